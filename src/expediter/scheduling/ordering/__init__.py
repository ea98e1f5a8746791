"""In which order waiting requests are tried; one class per policy, by name in `registry`."""
