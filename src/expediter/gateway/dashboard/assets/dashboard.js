(() => {
  "use strict";
  const POLL_MS = 2000;
  const MAX_SLOW = 12;
  const MAX_TENANTS = 8;
  const root = document.documentElement;
  const at = (id) => document.getElementById(id);
  const points = new Map(); // by index of their interval
  const plots = new Map();
  let feed = null;

  const colour = (name) => getComputedStyle(root).getPropertyValue(`--${name}`).trim();
  const short = (value) => String(Number(value.toPrecision(3)));
  const seconds = (v) => (v == null ? "–" : v < 0.9995 ? `${short(v * 1000)} ms` : `${short(v)} s`);
  const share = (v) => (v == null ? "–" : `${short(v * 100)} %`);
  const number = (v) => (v == null ? "–" : Math.abs(v) >= 1000 ? Math.round(v).toLocaleString("en") : short(v));
  const clock = (s) => new Date(s * 1000).toLocaleTimeString("en-GB");

  // Text only: names of tenants and models come from outside.
  const element = (tag, text = "", kind = "") => {
    const made = document.createElement(tag);
    made.textContent = text;
    if (kind) made.className = kind;
    return made;
  };

  const sum = (values) => values.reduce((total, value) => total + value, 0);
  const counts = (shown, field) => sum(shown.map((p) => sum(Object.values(p.tenants).map((t) => t[field]))));
  const mean = (values) => (values.length ? sum(values) / values.length : null);
  const known = (values) => values.filter((v) => v != null);

  const inOrder = () => [...points.values()].sort((a, b) => a.index - b.index);

  const take = (got) => {
    feed = got;
    got.points.forEach((point) => points.set(point.index, point));
    const newest = Math.max(...points.keys());
    for (const index of points.keys()) if (index <= newest - got.num_intervals) points.delete(index);
  };

  // ---- figures of the last minute

  const showFigures = (all) => {
    // Whole intervals and the one that has begun: what is counted and the time that it is divided by begin together.
    const first = all[0]?.at ?? feed.now;
    const from = first + Math.max(Math.ceil((feed.now - 60 - first) / feed.interval_s), 0) * feed.interval_s;
    const shown = all.filter((p) => p.at > from - feed.interval_s / 2);
    const span = Math.max(feed.now - from, feed.interval_s);
    const [met, missed] = [counts(shown, "met"), counts(shown, "missed")];
    const worst = (of, place) => known(shown.map((p) => p[of][place]));
    const middle = (values) => known(values).sort((a, b) => a - b)[Math.floor(values.length / 2)] ?? null;
    const queue = feed.queue_requests ? ` ${number(feed.queue_tokens)} tokens` : "";
    const figures = [
      ["Requests", number(counts(shown, "ended") / span), " /s"],
      ["Within targets", met + missed ? share(met / (met + missed)) : "–", ""],
      ["TTFT p50", seconds(middle(worst("ttft_s", 0))), ""],
      ["TTFT p99, worst 5 s", seconds(Math.max(...worst("ttft_s", 1), -1) >= 0 ? Math.max(...worst("ttft_s", 1)) : null), ""],
      ["TPOT p50", seconds(middle(worst("tpot_s", 0))), ""],
      ["In flight", number(feed.in_flight), ""],
      ["In the queue", number(feed.queue_requests), queue],
      ["Cache hits", share(mean(known(shown.map((p) => p.hit_rate)))), ""],
    ];
    at("figures").replaceChildren(
      ...figures.map(([name, value, unit]) => {
        const box = element("div");
        const figure = element("dd", value);
        if (unit) figure.append(element("small", unit));
        box.append(element("dt", name), figure);
        return box;
      }),
    );
  };

  // ---- plots

  // Up to the last interval that is over: one that has only begun would look like a fall.
  const grid = (all) => {
    const step = feed.interval_s;
    const start = all[0] ?? { index: 0, at: feed.now };
    const now = start.index + Math.floor((feed.now - start.at) / step) - 1;
    const first = Math.max(now - feed.num_intervals + 1, Math.min(start.index, now - 23));
    const offset = start.at - start.index * step;
    const indexes = Array.from({ length: now - first + 1 }, (_, i) => first + i);
    return { x: indexes.map((i) => i * step + offset), of: indexes.map((i) => points.get(i)) };
  };

  const targets = (kind) =>
    feed.targets.filter((t) => t[kind] != null).slice(0, 3).map((t) => ({
      label: `${t.name} ${seconds(t[kind])}`, value: t[kind],
    }));

  const definitions = () => {
    const names = busiest();
    const latency = (kind) => {
      const aims = targets(kind);
      return {
        say: seconds, log: true,
        series: [
          { label: "p50", stroke: "series-0" }, { label: "p99", stroke: "series-1" },
          ...aims.map((aim) => ({ label: `target ${aim.label}`, stroke: "reference", dash: [4, 4] })),
        ],
        rows: (of) => [
          of.map((p) => p?.[kind][0] ?? null), of.map((p) => p?.[kind][1] ?? null),
          ...aims.map((aim) => of.map(() => aim.value)),
        ],
      };
    };
    return {
      ttft: latency("ttft_s"),
      tpot: latency("tpot_s"),
      goodput: {
        say: number,
        series: names.map((name, i) => ({ label: name || "everybody", stroke: `series-${i % 12}` })),
        rows: (of) => names.map((name) => smoothed(of.map((p) => (p?.tenants[name]?.met ?? 0) / feed.interval_s))),
      },
      hits: {
        say: share, max: 1,
        series: [{ label: "hit rate", stroke: "series-2" }],
        rows: (of) => [of.map((p) => p?.hit_rate ?? null)],
      },
    };
  };

  // A request ends now and then: over half a minute that is a rate.
  const smoothed = (row) => row.map((_, i) => mean(row.slice(Math.max(i - 5, 0), i + 1)));

  const busiest = () => {
    const totals = new Map();
    for (const point of points.values())
      for (const [name, of] of Object.entries(point.tenants)) totals.set(name, (totals.get(name) ?? 0) + of.ended);
    return [...totals].sort((a, b) => b[1] - a[1] || a[0].localeCompare(b[0])).slice(0, MAX_TENANTS).map(([name]) => name);
  };

  const make = (id, definition, data) => {
    const box = at(id);
    box.replaceChildren();
    const axis = {
      stroke: colour("soft"), font: "12px system-ui, sans-serif",
      grid: { stroke: colour("grid"), width: 1 }, ticks: { stroke: colour("grid"), width: 1 },
    };
    const options = {
      width: box.clientWidth, height: 190, padding: [8, 22, 0, 0],
      scales: { y: { distr: definition.log ? 3 : 1, range: (u, low, high) => range(definition, low, high) } },
      axes: [
        { ...axis, size: 30, values: (u, splits) => splits.map((s) => clock(s).slice(0, 5)), space: 60, incrs: [60, 120, 300, 600] },
        { ...axis, size: 62, ...(definition.log && { splits: (u, i, low, high) => decades(low, high), filter: (u, splits) => splits }), values: (u, splits) => splits.map((v) => (v == null ? "" : definition.say(v))) },
      ],
      series: [
        { label: "at", value: (u, v) => (v == null ? "–" : clock(v)) },
        ...definition.series.map((series) => ({
          label: series.label, stroke: colour(series.stroke), width: series.dash ? 1.5 : 2, dash: series.dash,
          points: { show: !series.dash, size: 4, filter: alone }, value: (u, v) => definition.say(v),
        })),
      ],
      cursor: { drag: { x: false, y: false } },
    };
    plots.set(id, { plot: new uPlot(options, data, box), shape: shapeOf(definition, box) });
  };

  // A point between two gaps would not be seen, since there is no line to it.
  const alone = (u, series) => {
    const row = u.data[series];
    const places = row.map((v, i) => (v != null && row[i - 1] == null && row[i + 1] == null ? i : -1)).filter((i) => i >= 0);
    return places;
  };

  const range = (definition, low, high) => {
    if (definition.max) return [0, definition.max];
    if (!definition.log) return [0, high > 0 ? high * 1.1 : 1];
    return low > 0 && high < Infinity ? [low / 1.5, high * 1.5] : [0.01, 1];
  };

  // 1, 2 and 5 of each power of ten; uPlot's own have ten lines of each.
  const decades = (low, high) => {
    const found = [];
    for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++)
      for (const digit of [1, 2, 5]) {
        const value = digit * 10 ** power;
        if (value >= low && value <= high) found.push(value);
      }
    return found;
  };

  const shapeOf = (definition, box) => JSON.stringify([definition.series, box.clientWidth, colour("ink")]);

  const showPlots = (all) => {
    const { x, of } = grid(all);
    for (const [id, definition] of Object.entries(definitions())) {
      const data = [x, ...definition.rows(of)];
      const drawn = plots.get(id);
      if (drawn?.shape === shapeOf(definition, at(id))) drawn.plot.setData(data);
      else {
        drawn?.plot.destroy();
        make(id, definition, data);
      }
    }
  };

  // ---- tables

  const cells = (id, rows, nothing) => {
    const names = [...at(id).querySelectorAll("thead th")].map((th) => th.textContent);
    const body = rows.map((row) => {
      const line = element("tr");
      row.forEach((cell, i) => {
        const made = i ? element("td") : element("th");
        if (!i) made.scope = "row";
        if (i && cell !== "") made.dataset.of = names[i];
        made.append(cell);
        line.append(made);
      });
      return line;
    });
    if (!rows.length) {
      const cell = element("td", nothing, "empty");
      cell.colSpan = names.length;
      body.push(element("tr"));
      body[0].append(cell);
    }
    at(id).querySelector("tbody").replaceChildren(...body);
  };

  const KINDS = { up: "good", probing: "doubtful", ejected: "bad", down: "bad", stalled: "bad" };
  const chip = (state) => element("span", state, `chip ${KINDS[state] ?? ""}`);

  const bar = (of) => {
    if (of == null) return "–";
    const cell = element("span");
    const track = element("span", "", of > 0.9 ? "bar full" : "bar");
    const fill = element("i");
    fill.style.width = `${Math.min(of, 1) * 100}%`;
    track.append(fill);
    cell.append(track, element("span", share(of), "figure"));
    return cell;
  };

  // What a backend serves matters where not all serve the same.
  const named = (b) => {
    const cell = element("span", b.name);
    if (feed.models.length > 1 && b.models.length) cell.append(element("small", ` ${b.models.join(", ")}`));
    return cell;
  };

  const showBackends = () => {
    const rows = feed.backends.map((b) => [
      named(b), chip(b.state), b.max_requests == null ? number(b.num_in_flight) : `${b.num_in_flight} of ${b.max_requests}`,
      number(b.num_running), number(b.num_waiting), number(b.num_pending_tokens), bar(b.kv_usage),
      b.metrics_age_s == null ? (b.is_own ? "now" : "–") : `${seconds(b.metrics_age_s)} ago`,
    ]);
    cells("backends", rows, "There are none.");
  };

  const showTenants = (all) => {
    const span = Math.max(all.length * feed.interval_s, feed.now - (all[0]?.at ?? feed.now), 1);
    const rows = busiest().map((name) => {
      const of = all.map((p) => p.tenants[name]).filter(Boolean);
      const total = (field) => sum(of.map((t) => t[field]));
      const judged = total("met") + total("missed");
      return [
        name || "everybody", number(total("ended")), judged ? share(total("met") / judged) : "–", number(total("missed")),
        number(total("limited")), number(total("wrong")), number(total("output_tokens") / span),
      ];
    });
    cells("tenants", rows, "No request has ended yet.");
  };

  const showSlow = (all) => {
    const every = all.flatMap((p) => p.slow);
    const waits = every.map((r) => r.wait_s).sort((a, b) => a - b);
    const long = waits[Math.floor(waits.length * 0.9)] ?? 0;
    const shown = every.filter((r) => r.met === false || r.wait_s >= long).sort((a, b) => b.ended_at - a.ended_at);
    at("slow").replaceChildren(
      ...shown.slice(0, MAX_SLOW).map((r) => {
        const line = element("li");
        const head = element("div", "", "head");
        head.append(
          element("b", r.outcome === "ok" ? seconds(r.wait_s) : `${r.outcome.replace("_", " ")} after ${seconds(r.e2e_s)}`, r.met === false ? "missed" : ""),
          element("span", [clock(r.ended_at), r.tenant, r.model, r.backend, r.id].filter(Boolean).join(" · "), "who"),
        );
        line.append(head, element("div", r.why, "why"));
        return line;
      }),
    );
    if (!shown.length) at("slow").append(element("li", "None yet.", "who"));
  };

  // ---- life

  const show = () => {
    if (!feed) return;
    const all = inOrder();
    at("models").textContent = feed.models.join(", ");
    showFigures(all);
    showPlots(all);
    showBackends();
    showTenants(all);
    showSlow(all);
  };

  const say = (text, kind) => {
    at("state").textContent = text;
    at("state").className = kind;
  };

  const poll = async () => {
    try {
      // The newest interval may have grown, and the one before it may have come late from another process.
      const since = points.size ? Math.max(...points.keys()) - 1 : 0;
      const reply = await fetch(`/dashboard/feed?since=${since}`, { cache: "no-store" });
      if (!reply.ok) throw new Error(`the server says ${reply.status}`);
      take(await reply.json());
      show();
      const missing = feed.num_processes - feed.num_answered;
      say(missing ? `live, but ${missing} of ${feed.num_processes} processes did not answer` : `live, ${clock(feed.now)}`, missing ? "lost" : "live");
      root.dataset.drawn = "yes";
    } catch (error) {
      const since = feed ? ` since ${clock(feed.now)}` : "";
      say(error instanceof TypeError ? `no answer${since}` : error.message, "lost");
    }
  };

  // Nobody looks at a hidden page, so nothing is asked for it.
  const live = async () => {
    if (!document.hidden) await poll();
    setTimeout(live, POLL_MS);
  };

  document.addEventListener("visibilitychange", () => document.hidden || poll());
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", show);
  addEventListener("resize", show);
  live();
})();
