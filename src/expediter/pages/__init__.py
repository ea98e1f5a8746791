"""What every page that Expediter makes is drawn with: uPlot, and the colours for light and dark."""
