"use strict";
// Draws the curves of one run from the data of page.py's _data(). Texts enter the page as text nodes.
// All panels share one axis: steps, or seconds since the run began.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const root = document.getElementById("charts");
  if (!root) return;
  const LEFT = 66, RIGHT = 14, HEIGHT = 118, TOP = 8, BOTTOM = 6;
  const LANES = { run: 0, fault: 0, save: 1, validation: 2, warning: 3 };
  const LANE_NAMES = ["run", "saves", "validation", "warnings"];
  const view = { axis: "x", range: null, at: null };
  let width = 800;

  const fill = (node, attributes, children) => {
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    node.append(...children);
    return node;
  };
  const element = (name, attributes = {}, ...children) =>
    fill(document.createElement(name), attributes, children);
  const svgElement = (name, attributes, ...children) =>
    fill(document.createElementNS("http://www.w3.org/2000/svg", name), attributes, children);
  const shape = (parent, ...description) => {
    const node = svgElement(...description);
    parent.append(node);
    return node;
  };

  // A curve's final steps, and its steps that were done again later.
  const partsOf = (curve) => [curve.kept, curve.redone];
  // On the axis of steps a start is drawn at its event "training", which has a step.
  const isDrawn = (event) => event.kind !== (view.axis === "x" ? "start" : "training");

  // ---- numbers ----

  const brief = (value) => {
    if (value === null || value === undefined) return "not finite";
    const size = Math.abs(value);
    if (size !== 0 && (size < 1e-3 || size >= 1e7)) return value.toExponential(2);
    if (size >= 1000) return Math.round(value).toLocaleString("en");
    return String(Number(value.toPrecision(4)));
  };
  const tickText = (value, gap) => {
    const size = Math.abs(value);
    if (size === 0) return "0";
    if (size < 1e-3 || size >= 1e7) return String(Number(value.toPrecision(3)).toExponential());
    const digits = Math.max(0, Math.min(6, -Math.floor(Math.log10(gap) + 1e-9)));
    return value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
  };
  const duration = (seconds) => {
    const s = Math.max(0, seconds);
    const found = [["d", 86400], ["h", 3600], ["min", 60]].find(([, size]) => s >= size) || ["s", 1];
    return `${Number((s / found[1]).toPrecision(3))} ${found[0]}`;
  };
  const ticks = (low, high, count, bases = []) => {
    const rough = (high - low) / count, power = 10 ** Math.floor(Math.log10(rough));
    const gap = [...bases, ...[1, 2, 5, 10].map((n) => n * power)].find((g) => g >= rough * 0.999);
    const values = [];
    for (let i = Math.ceil(low / gap - 1e-9); i * gap <= high + gap * 1e-9; i++) values.push(i * gap + 0); // no -0
    return { gap, values };
  };

  // ---- the shared axis ----

  const bounds = () => {
    let low = Infinity, high = -Infinity;
    const take = (value) => { low = Math.min(low, value); high = Math.max(high, value); };
    const curves = data.panels.flatMap((panel) => panel.curves);
    for (const part of curves.flatMap(partsOf)) part[view.axis].forEach(take);
    for (const event of data.events) take(event[view.axis]);
    if (!(high > low)) { low = Math.min(low, 0); high = low + 1; }
    return [low, high];
  };
  const range = () => view.range || bounds();
  const pixel = (value) => {
    const [low, high] = range();
    return LEFT + ((value - low) / (high - low)) * (width - LEFT - RIGHT);
  };
  const valueAt = (px) => {
    const [low, high] = range();
    const share = (px - LEFT) / (width - LEFT - RIGHT);
    return low + Math.min(1, Math.max(0, share)) * (high - low);
  };
  const axisTicks = () => {
    const [low, high] = range(), count = Math.max(3, Math.floor(width / 130));
    if (view.axis === "x") {
      const found = ticks(low, high, count, high - low < count ? [1] : []);
      return found.values.map((v) => [v, Math.round(v).toLocaleString("en")]);
    }
    const bases = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400];
    return ticks(low, high, count, high - low > count ? bases : []).values.map((v) => [v, duration(v)]);
  };

  // ---- drawing ----

  const verticals = (svg, height) => {
    for (const stretch of data.redone) {
      const [from, to] = view.axis === "x" ? [stretch.x0, stretch.x1] : [stretch.t0, stretch.t1];
      const left = Math.max(LEFT, pixel(from)), right = Math.min(width - RIGHT, pixel(to));
      if (right > left) shape(svg, "rect", { class: "redone", x: left, y: 0, width: right - left, height });
    }
    for (const [value] of axisTicks()) {
      shape(svg, "line", { class: "grid", x1: pixel(value), x2: pixel(value), y1: 0, y2: height });
    }
    const isLater = (event) => event.group === "fault" || (event.kind === "training" && event.x > 0);
    for (const event of data.events.filter(isLater)) {
      const x = pixel(event[view.axis]);
      if (x < LEFT || x > width - RIGHT) continue;
      shape(svg, "line", { class: `rule ${event.group}`, x1: x, x2: x, y1: 0, y2: height });
    }
  };

  // A curve has a gap at each value that is not finite, and at each restart unless it is `joined`.
  // On the axis of steps, final steps are joined, because a restart continues them.
  const pathOf = (part, y, joined) => {
    const x = part[view.axis];
    let text = "", penIsDown = false;
    for (let i = 0; i < x.length; i++) {
      const height = y(part.y[i]);
      if (height === null) { penIsDown = false; continue; }
      if (i > 0 && part.start[i] !== part.start[i - 1] && !joined) penIsDown = false;
      text += `${penIsDown ? "L" : "M"}${pixel(x[i]).toFixed(1)} ${height.toFixed(1)}`;
      penIsDown = true;
    }
    return text;
  };

  const valueScale = (panel) => {
    const [from, to] = range(), inside = [], all = [];
    for (const part of panel.curves.flatMap(partsOf)) {
      part.y.forEach((value, i) => {
        if (value === null) return;
        all.push(value);
        if (part[view.axis][i] >= from && part[view.axis][i] <= to) inside.push(value);
      });
    }
    const chosen = inside.length ? inside : all.length ? all : [1];
    let low = chosen.reduce((a, b) => Math.min(a, b)), high = chosen.reduce((a, b) => Math.max(a, b));
    if (low > 0 && low < 0.4 * high) low = 0;
    if (high - low < 1e-9 * Math.max(1, Math.abs(high))) {
      const room = Math.abs(high) * 0.1 || 1;
      if (low !== 0) low -= room;
      high += room;
    }
    const room = (high - low) * 0.05, top = high + room;
    if (low !== 0) low -= room;
    const { gap, values } = ticks(low, top, 5);
    return {
      y: (v) => (v === null ? null : TOP + (1 - (v - low) / (top - low)) * (HEIGHT - TOP - BOTTOM)),
      marks: values.map((v) => [v, tickText(v, gap)]),
    };
  };

  const startDrawing = (svg, height, plotHeight) => {
    svg.replaceChildren();
    fill(svg, { viewBox: `0 0 ${width} ${height}`, height }, []);
    shape(svg, "rect", { class: "plot", x: LEFT, y: 0, width: width - LEFT - RIGHT, height: plotHeight });
    verticals(svg, plotHeight);
  };

  const drawPanel = (panel) => {
    const svg = panel.svg;
    startDrawing(svg, HEIGHT, HEIGHT);
    const { y, marks } = valueScale(panel);
    for (const [value, text] of marks) {
      shape(svg, "line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y(value), y2: y(value) });
      shape(svg, "text", { x: LEFT - 8, y: y(value) + 4, "text-anchor": "end" }, text);
    }
    const inside = shape(svg, "svg", { x: LEFT, y: 0, width: width - LEFT - RIGHT, height: HEIGHT,
      viewBox: `${LEFT} 0 ${width - LEFT - RIGHT} ${HEIGHT}` });
    panel.curves.forEach((curve, i) => {
      const hue = `s${i % 6}`;
      shape(inside, "path", { class: `curve dashed ${hue}`, d: pathOf(curve.redone, y, false) });
      shape(inside, "path", { class: `curve ${hue}`, d: pathOf(curve.kept, y, view.axis === "x") });
      const isSparse = curve.kept.y.length + curve.redone.y.length <= 60;
      for (const part of partsOf(curve)) {
        part.y.forEach((value, j) => {
          const x = pixel(part[view.axis][j]);
          if (value === null) {
            shape(inside, "path", { class: "wrong", d: `M${x - 3.5} ${TOP - 4}l7 7m0 -7l-7 7` });
          } else if (isSparse && y(value) !== null) {
            shape(inside, "circle", { class: `dot ${hue}`, cx: x, cy: y(value), r: 2.6 });
          }
        });
      }
    });
    panel.cursor = shape(svg, "line", { class: "cursor", y1: 0, y2: HEIGHT, visibility: "hidden" });
    panel.choice = shape(svg, "rect", { class: "chosen", y: 0, height: HEIGHT, visibility: "hidden" });
  };

  const markers = {
    run: (x, y) => `M${x - 3.5} ${y - 5}L${x + 5} ${y}L${x - 3.5} ${y + 5}Z`,
    fault: (x, y) => `M${x - 4} ${y - 4}l8 8m0 -8l-8 8`,
    save: (x, y) => `M${x - 3.5} ${y - 3.5}h7v7h-7Z`,
    validation: (x, y) => `M${x} ${y - 3}v6`,
    warning: (x, y) => `M${x} ${y - 4.5}l5 9h-10Z`,
  };
  const usedLanes = () => [...new Set(data.events.map((event) => LANES[event.group]))].sort();

  const drawTimeline = () => {
    const lanes = usedLanes(), laneHeight = 17, height = lanes.length * laneHeight + 20;
    const svg = timeline.svg;
    startDrawing(svg, height, height - 20);
    lanes.forEach((lane, i) => {
      const y = i * laneHeight + laneHeight / 2;
      shape(svg, "text", { x: LEFT - 8, y: y + 4, "text-anchor": "end" }, LANE_NAMES[lane]);
    });
    for (const event of data.events.filter(isDrawn)) {
      const x = pixel(event[view.axis]), y = lanes.indexOf(LANES[event.group]) * laneHeight + laneHeight / 2;
      if (x < LEFT - 1 || x > width - RIGHT + 1) continue;
      let path = markers[event.group](x, y);
      if (event.kind === "end" || event.kind === "stop") path = `M${x - 3.5} ${y - 4.5}h3v9h-3Z`;
      const node = shape(svg, "path", { class: `event ${event.group}`, d: path });
      if (event.group === "fault" || event.group === "validation") node.setAttribute("stroke-width", 2);
      shape(node, "title", {}, `${event.kind}: ${event.text}`);
    }
    for (const [value, text] of axisTicks()) {
      shape(svg, "text", { x: pixel(value), y: height - 5, "text-anchor": "middle" }, text);
    }
    shape(svg, "text", { x: 0, y: height - 5 }, view.axis === "x" ? "step" : "time");
    timeline.cursor = shape(svg, "line", { class: "cursor", y1: 0, y2: height - 18, visibility: "hidden" });
  };

  // ---- the cursor ----

  // The point of a curve that is nearest to a value on the axis. Of equally near points of a part,
  // the last counts.
  const pointAt = (curve, value) => {
    let point = null;
    for (const part of view.axis === "x" ? [curve.kept] : partsOf(curve)) {
      part[view.axis].forEach((at, i) => {
        const distance = Math.abs(at - value);
        if (!point || distance < point.distance || (distance === point.distance && part === point.part)) {
          point = { part, distance, x: part.x[i], t: part.t[i], y: part.y[i] };
        }
      });
    }
    return point;
  };

  const showCursor = () => {
    const isOn = view.at !== null;
    const x = isOn ? pixel(view.at) : 0;
    for (const panel of [timeline, ...data.panels]) {
      if (!panel.cursor) continue;
      panel.cursor.setAttribute("visibility", isOn ? "visible" : "hidden");
      panel.cursor.setAttribute("x1", x);
      panel.cursor.setAttribute("x2", x);
    }
    let place = null;
    for (const panel of data.panels) {
      panel.curves.forEach((curve) => {
        const point = isOn ? pointAt(curve, view.at) : null;
        curve.readout.textContent = point ? brief(point.y) : "";
        if (point && (!place || point.distance < place.distance)) place = point;
      });
    }
    timeline.place.textContent = place
      ? `step ${place.x.toLocaleString("en")} · ${duration(place.t)} after the start` : "";
  };

  const drawAll = () => {
    width = Math.max(320, root.clientWidth);
    drawTimeline();
    for (const panel of data.panels) if (!panel.fold || panel.fold.open) drawPanel(panel);
    for (const [button, isOn] of timeline.buttons()) button.setAttribute("aria-pressed", isOn);
    timeline.reset.disabled = view.range === null;
    showCursor();
  };

  // ---- the page ----

  const newSvg = (label) => svgElement("svg", { role: "img", "aria-label": label });
  const buttonFor = (text, action) => {
    const button = element("button", { type: "button" }, text);
    button.addEventListener("click", () => { action(); drawAll(); });
    return button;
  };

  const byStep = buttonFor("steps", () => { view.axis = "x"; view.range = view.at = null; });
  const byTime = buttonFor("wall-clock", () => { view.axis = "t"; view.range = view.at = null; });
  const timeline = {
    svg: newSvg("starts, saves, warnings and faults"),
    place: element("span", { id: "place" }),
    reset: buttonFor("show all", () => { view.range = null; }),
    buttons: () => [[byStep, view.axis === "x"], [byTime, view.axis === "t"]],
  };
  root.append(element("div", { id: "timeline" },
    element("div", { class: "bar" },
      element("span", { class: "switch", role: "group", "aria-label": "axis" }, byStep, byTime),
      timeline.reset, timeline.place),
    timeline.svg));

  let fold = null;
  for (const panel of data.panels) {
    panel.svg = newSvg(panel.title);
    const legend = panel.curves.map((curve, i) => {
      curve.readout = element("b");
      const line = element("i", { class: `s${i % 6}` });
      // A curve without a label is the only one in its panel, whose title names the curve.
      const name = curve.label ? [line, curve.label] : [];
      return element("span", { class: "key" }, ...name, curve.readout);
    });
    const box = element("section", { class: "panel" },
      element("header", {}, element("h2", {}, panel.title), ...legend), panel.svg);
    if (panel.more && !fold) {
      const count = data.panels.filter((other) => other.more).length;
      fold = element("details", {}, element("summary", {}, `More metrics (${count})`));
      fold.addEventListener("toggle", drawAll);
      root.append(fold);
    }
    if (panel.more) panel.fold = fold;
    (panel.more ? fold : root).append(box);
  }

  // ---- pointer and keys ----

  let dragFrom = null;
  const showChoice = (to) => {
    for (const panel of data.panels) {
      if (!panel.choice) continue;
      panel.choice.setAttribute("visibility", to === null ? "hidden" : "visible");
      if (to === null) continue;
      panel.choice.setAttribute("x", Math.min(dragFrom, to));
      panel.choice.setAttribute("width", Math.abs(to - dragFrom));
    }
  };
  const place = (event) => event.clientX - root.getBoundingClientRect().left;
  const isOnPlot = (event) => event.target.closest && event.target.closest("svg") !== null;
  root.addEventListener("pointermove", (event) => {
    if (dragFrom !== null) showChoice(Math.min(width - RIGHT, Math.max(LEFT, place(event))));
    if (!isOnPlot(event) && dragFrom === null) return;
    view.at = valueAt(place(event));
    showCursor();
  });
  root.addEventListener("pointerdown", (event) => {
    if (event.button === 0 && event.pointerType === "mouse" && isOnPlot(event)) dragFrom = place(event);
  });
  window.addEventListener("pointerup", (event) => {
    if (dragFrom === null) return;
    const from = dragFrom, to = place(event);
    showChoice(null);
    dragFrom = null;
    if (Math.abs(to - from) > 6) {
      view.range = [valueAt(Math.min(from, to)), valueAt(Math.max(from, to))];
      drawAll();
    }
  });
  root.addEventListener("dblclick", (event) => {
    if (isOnPlot(event)) { view.range = null; drawAll(); }
  });
  root.addEventListener("pointerleave", () => { view.at = null; showCursor(); });
  window.addEventListener("resize", drawAll);
  drawAll();
})();
