(() => {
  "use strict";
  const root = document.documentElement;
  const { figures, view: firstView } = JSON.parse(document.getElementById("data").textContent);
  const dashes = [[], [9, 4], [3, 3], [], [14, 5], [2, 5], [], [6, 2]];
  const plots = new Map();
  let view = firstView;

  const colour = (name) => getComputedStyle(root).getPropertyValue(`--${name}`).trim();
  const short = (value) => String(Number(value.toPrecision(3)));
  const units = {
    s: (v) => (v === 0 ? "0 s" : Math.abs(v) < 0.9995 ? `${short(v * 1000)} ms` : `${short(v)} s`),
    share: (v) => `${short(v * 100)} %`,
    number: (v) => (Math.abs(v) >= 1000 ? Math.round(v).toLocaleString("en") : short(v)),
  };

  // Vertical lines with a word beside them: a target, the last arrival.
  const marksOf = (shown, text) => (u) => {
    const { ctx } = u;
    const ratio = devicePixelRatio;
    ctx.save();
    ctx.font = `${12 * ratio}px system-ui, sans-serif`;
    for (const { x, label } of shown.marks) {
      const at = u.valToPos(x, "x", true);
      if (at < u.bbox.left || at > u.bbox.left + u.bbox.width) continue;
      ctx.strokeStyle = ctx.fillStyle = text;
      ctx.setLineDash([4 * ratio, 4 * ratio]);
      ctx.beginPath();
      ctx.moveTo(at, u.bbox.top);
      ctx.lineTo(at, u.bbox.top + u.bbox.height);
      ctx.stroke();
      const isRight = at > u.bbox.left + u.bbox.width * 0.6;
      ctx.textAlign = isRight ? "right" : "left";
      ctx.fillText(label, at + (isRight ? -6 : 6) * ratio, u.bbox.top + u.bbox.height - 8 * ratio);
    }
    ctx.restore();
  };

  // From the lowest to the highest draw of the traffic.
  const rangesOf = (shown, strokes) => (u) => {
    const { ctx } = u;
    ctx.save();
    ctx.lineWidth = 1.5 * devicePixelRatio;
    shown.ranges.forEach((range, i) => {
      ctx.strokeStyle = strokes[i];
      range?.forEach(([low, high], j) => {
        const at = u.valToPos(shown.x[j], "x", true);
        const [top, bottom] = [u.valToPos(high, "y", true), u.valToPos(low, "y", true)];
        const cap = 4 * devicePixelRatio;
        ctx.beginPath();
        for (const y of [top, bottom]) {
          ctx.moveTo(at - cap, y);
          ctx.lineTo(at + cap, y);
        }
        ctx.moveTo(at, top);
        ctx.lineTo(at, bottom);
        ctx.stroke();
      });
    });
    ctx.restore();
  };

  const draw = (element) => {
    plots.get(element)?.destroy();
    element.textContent = "";
    const figure = figures[element.id];
    const shown = figure.views[view] ?? figure.views[""];
    const width = element.clientWidth;
    const say = { x: units[figure.x.unit], y: units[figure.y.unit] };
    const [ink, grid] = [colour("soft"), colour("grid")];
    const strokes = figure.series.map((series) => colour(series.colour));
    const axis = {
      stroke: ink, font: "12px system-ui, sans-serif", labelFont: "12px system-ui, sans-serif",
      grid: { stroke: grid, width: 1 }, ticks: { stroke: grid, width: 1 },
    };
    const named = (name) => (u, splits) => splits.map((v) => (v == null ? "" : say[name](v)));
    const options = {
      width,
      height: Math.round(Math.min(360, Math.max(240, width * 0.52))),
      padding: [12, 28, 0, 0],
      scales: {
        x: { time: false, distr: figure.x.log ? 3 : 1 },
        y: { range: (u, low, high) => [figure.y.min ?? low, figure.y.max ?? (high > 0 ? high * 1.06 : 1)] },
      },
      axes: [
        { ...axis, label: figure.x.label, labelSize: 20, size: 34, values: named("x"), space: 70 },
        { ...axis, label: figure.y.label, labelSize: 20, size: 58, values: named("y") },
      ],
      series: [
        { label: figure.x.name, value: (u, v) => (v == null ? "–" : say.x(v)) },
        ...figure.series.map((series, i) => ({
          label: series.name, stroke: strokes[i], width: series.dash == null ? 1.5 : 2.25, spanGaps: false,
          dash: series.dash == null ? [2, 4] : dashes[series.dash % dashes.length],
          points: { show: figure.points && series.dash != null, size: 7, stroke: strokes[i], fill: strokes[i] },
          value: (u, v) => (v == null ? "–" : say.y(v)),
        })),
      ],
      legend: { markers: { width: 3, dash: (u, i) => ["solid", "dashed", "dotted"][(figure.series[i - 1]?.dash ?? 2) % 3] } },
      cursor: { drag: { x: false, y: false }, points: { size: 7 } },
      hooks: { draw: [marksOf(shown, ink), rangesOf(shown, strokes)] },
    };
    plots.set(element, new uPlot(options, [shown.x, ...shown.y], element));
  };

  const elements = [...document.querySelectorAll(".plot")];
  const drawAll = () => elements.forEach(draw);
  const choose = (chosen) => {
    view = chosen;
    document.querySelectorAll("[data-view]").forEach((e) => e.classList.toggle("now", e.dataset.view === view));
    elements.filter((e) => !("" in figures[e.id].views)).forEach(draw);
  };

  root.classList.add("js");
  document.querySelectorAll(".choice input").forEach((e) => e.addEventListener("change", () => choose(e.value)));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
  addEventListener("beforeprint", () => { root.classList.add("light"); drawAll(); });
  addEventListener("afterprint", () => { root.classList.remove("light"); drawAll(); });
  const widths = new Map();
  const watch = new ResizeObserver((entries) => {
    for (const { target } of entries) {
      if (widths.get(target) === target.clientWidth) continue;
      widths.set(target, target.clientWidth);
      draw(target);
    }
  });
  choose(view);
  elements.forEach((e) => watch.observe(e));
})();
