// Plot: one chart of ECharts, from what charts.py makes. Used by the live page and by the report, so it asks nobody for
// anything, and whatever comes from a run is drawn on the canvas or set as textContent, never as markup.

const LOOKS = {
  light: { text: "#5b6675", strong: "#1d2733", line: "#d8dee6", grid: "#edf0f4", tip: "#ffffff", tipBorder: "#d8dee6" },
  dark: { text: "#93a1b3", strong: "#e6ebf2", line: "#313b49", grid: "#252e3a", tip: "#1b222c", tipBorder: "#3a4554" },
};
const RED = "#e0464c";
const GAPS = 200; // marks on an axis, about
const ROWS = 24; // of a tooltip
const CLICK = 6; // pixels: a shorter drag is a click
export const AS_ITSELF = new Set(["1", "loss", "bytes", "fraction", "seconds"]); // units that need no word, or are on the axis

// All digits that tell one float32 from the next, and those of a whole number.
export function exact(value) {
  if (Number.isSafeInteger(value)) return String(value);
  return typeof value === "number" ? String(Number(value.toPrecision(9))) : String(value);
}

// A number for an axis or a tile: short, in the unit's usual form.
export function format(value, unit, digits = 4) {
  if (value === null || value === undefined) return "–";
  if (typeof value !== "number") return value === "nan" ? "NaN" : value === "inf" ? "∞" : value === "-inf" ? "−∞" : String(value);
  const size = Math.abs(value);
  if (unit === "bytes") {
    // Powers of ten, so that the round numbers of an axis are round.
    const power = size < 1000 ? 0 : Math.min(Math.floor(Math.log10(size) / 3), 4);
    return cut(value / 10 ** (3 * power), digits) + " " + ["B", "kB", "MB", "GB", "TB"][power];
  }
  if (unit === "fraction") return trim(value * 100, digits) + " %";
  if (unit === "seconds") return size >= 1 || size === 0 ? trim(value, digits) + " s" : size >= 1e-3 ? trim(value * 1e3, digits) + " ms" : trim(value * 1e6, digits) + " µs";
  return trim(value, digits);
}

// A tick of an axis, with all its digits: they are few, unless neighbours differ in none but the last.
function tick(value, unit) {
  return format(value, unit, 12);
}

function trim(value, digits) {
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size >= 1e15 || size < 1e-3) return Number(value.toPrecision(digits - 1)).toExponential().replace("e+", "e");
  if (size >= 1e9) return cut(value / 1e9, digits) + "G";
  if (size >= 1e6) return cut(value / 1e6, digits) + "M";
  if (size >= 1e4) return cut(value / 1e3, digits) + "k";
  return cut(value, digits);
}

function cut(value, digits = 4) {
  return String(Number(value.toPrecision(digits)));
}

// The ends of a logarithmic axis: 1, 2 or 5 times a power of ten, since whole decades may leave most of it empty.
function below(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return value > 0 && value < Infinity ? [5, 2, 1].find((factor) => factor * power <= value * (1 + 1e-9)) * power : null;
}

function above(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return value > 0 && value < Infinity ? [1, 2, 5, 10].find((factor) => factor * power >= value * (1 - 1e-9)) * power : null;
}

// A step on an axis from low to high: short, unless that would make neighbours alike.
function stepLabel(value, low, high) {
  if (high < 1e4 || value < 1000 || high - low < high / 50) return value.toLocaleString("en");
  return value >= 1e6 ? cut(value / 1e6) + "M" : cut(value / 1e3) + "k";
}

// 1, 2 or 5 times a power of ten, of about this size.
function round(size) {
  const power = 10 ** Math.floor(Math.log10(Math.max(size, 1)));
  return power * [1, 2, 5, 10].find((factor) => factor * power >= 0.75 * size);
}

export function duration(seconds) {
  const s = Math.round(seconds);
  if (s < 60) return s + " s";
  const pad = (n) => String(n).padStart(2, "0");
  if (s < 3600) return Math.floor(s / 60) + ":" + pad(s % 60) + " min";
  if (s < 172800) return Math.floor(s / 3600) + ":" + pad(Math.floor(s / 60) % 60) + " h";
  return Math.floor(s / 86400) + " d " + (Math.floor(s / 3600) % 24) + " h";
}

const CLOCK = [2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400];

// A time on an axis of so many seconds: as exact as its neighbours need.
export function timeLabel(seconds, span) {
  const s = Math.round(seconds), pad = (n) => String(n).padStart(2, "0");
  if (span < 6 && s < 60) return cut(seconds) + " s";
  if (span < 1200 && s >= 3600) return Math.floor(s / 3600) + ":" + pad(Math.floor(s / 60) % 60) + ":" + pad(s % 60);
  if (span < 172800 && s >= 172800) return Math.floor(s / 86400) + " d " + (Math.floor(s / 3600) % 24) + ":" + pad(Math.floor(s / 60) % 60);
  return duration(s);
}

export function formatX(value, kind) {
  if (kind === "clock") return new Date(value).toLocaleString(undefined, { month: "short", day: "numeric", hour: "2-digit", minute: "2-digit", second: "2-digit" });
  return kind === "time" ? duration(value) : value.toLocaleString("en");
}

export function themes(echarts) {
  for (const [name, look] of Object.entries(LOOKS)) {
    const axis = {
      axisLine: { show: true, lineStyle: { color: look.line } }, axisTick: { show: false },
      axisLabel: { color: look.text, fontSize: 11 }, splitLine: { lineStyle: { color: look.grid } },
      axisPointer: { lineStyle: { color: look.text, width: 1, type: "solid" }, label: { show: false } },
    };
    echarts.registerTheme("instrument-" + name, {
      backgroundColor: "transparent", textStyle: { fontFamily: "system-ui, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif", color: look.text },
      valueAxis: axis, logAxis: axis, timeAxis: axis, categoryAxis: axis,
      legend: { textStyle: { color: look.text, fontSize: 11 }, pageTextStyle: { color: look.text }, pageIconColor: look.text, pageIconInactiveColor: look.line, pageIconSize: 10, inactiveColor: look.line },
      visualMap: { textStyle: { color: look.text, fontSize: 11 } },
      tooltip: { backgroundColor: look.tip, borderColor: look.tipBorder, borderWidth: 1, padding: [8, 10], textStyle: { color: look.strong, fontSize: 12 }, extraCssText: "box-shadow:0 4px 18px rgba(0,0,0,.16);border-radius:8px;max-height:60vh;overflow:hidden" },
    });
  }
}

export class Plot {
  // on: {zoom(x0, x1), move(x), hover(x or null), note(text), pick(step), hide(entry of the legend)}; x in units of the axis. Any may
  // be missing.
  constructor(echarts, element, dark, on = {}) {
    this.echarts = echarts;
    this.element = element;
    this.dark = dark;
    this.on = on;
    this.data = new Map(); // series id to points as they came
    this.gaps = new Map(); // y axis to how many marks of gaps are drawn, and how many there are
    this.chart = null;
    this.cursor = document.createElement("div");
    this.cursor.className = "iv-cursor";
    this.band = document.createElement("div");
    this.band.className = "iv-band";
    this.legend = document.createElement("div");
    this.legend.className = "iv-legend";
    element.before(this.legend);
    this.hidden = new Set(); // labels of legend entries that are switched off
    this.resizer = new ResizeObserver(() => this._resize());
    this.resizer.observe(element);
    this._touch();
  }

  // A chart as charts.py has it; everything before is gone.
  draw({ kind, option, extra }) {
    this.kind = kind;
    this.option = option;
    this.extra = extra;
    this.data.clear();
    for (const series of option.series) {
      this.data.set(series.id, series.data || []);
    }
    this._legend();
    this._make();
    this._show(true);
    // Legends of other charts in the row may change this one's height, and change it back before the observer looks.
    requestAnimationFrame(() => this._resize());
  }

  // What is new: {option: parts to merge, series: [{id, keep, add}]}.
  grow({ option, series }) {
    if (!this.chart) return;
    for (const { id, keep, add } of series || []) {
      const points = this.data.get(id);
      if (!points) continue;
      points.length = Math.min(keep, points.length);
      for (const point of add) points.push(point);
    }
    if (option && option.xAxis) Object.assign(this.option.xAxis, option.xAxis);
    for (const part of (option && option.series) || []) {
      Object.assign(this.option.series.find((each) => each.id === part.id) || {}, part);
    }
    this._show(false);
  }

  // Switch off these entries of the legend, and no others.
  hide(labels) {
    if (labels.length === this.hidden.size && labels.every((label) => this.hidden.has(label))) return;
    this.hidden = new Set(labels);
    if (this.chart && this.kind === "lines") {
      this._legend();
      this._show(false);
    }
  }

  theme(dark) {
    if (dark === this.dark) return;
    this.dark = dark;
    if (this.option) {
      this._make();
      this._show(true);
    }
  }

  // The other charts' place of the mouse: a thin line, and the values there by note().
  showCursor(x) {
    if (!this.chart || this.kind !== "lines") return;
    const pixel = x === null ? NaN : this.chart.convertToPixel({ xAxisIndex: 0 }, x);
    const area = this._area();
    const inside = area && pixel >= area.x && pixel <= area.x + area.width;
    this.cursor.style.display = inside ? "block" : "none";
    if (inside) {
      this.cursor.style.left = pixel + "px";
      this.cursor.style.top = area.y + "px";
      this.cursor.style.height = area.height + "px";
    }
  }

  // The newest value of each curve, for those who cannot see it.
  summary() {
    if (this.kind !== "lines") return "";
    return this._curves().map(({ label, points }) => {
      const last = points[points.length - 1];
      return last ? `${label} ${last[1] === null ? last[2] : exact(last[1])}` : `${label} without values`;
    }).join(", ");
  }

  dispose() {
    this.resizer.disconnect();
    this.legend.remove();
    if (this.chart) this.chart.dispose();
    this.chart = null;
  }

  _resize() {
    if (!this.chart) return;
    const narrow = this.element.clientWidth < 420;
    if (narrow !== this.narrow) this._show(true); // other ticks
    if (this.chart.getWidth() !== this.element.clientWidth || this.chart.getHeight() !== this.element.clientHeight) this.chart.resize();
  }

  _make() {
    if (this.chart) this.chart.dispose();
    this.chart = this.echarts.init(this.element, this.dark ? "instrument-dark" : "instrument-light", { renderer: "canvas" });
    this.element.append(this.cursor, this.band);
    this.cursor.style.display = this.band.style.display = "none";
    this._mouse();
  }

  _show(whole) {
    const { option, kind } = this;
    this.narrow = this.element.clientWidth < 420;
    if (kind === "lines") {
      this.gaps.clear();
      const series = option.series.map((each) => (isMark(each) ? { ...each, data: this._gaps(each.yAxisIndex || 0) } : { ...each, ...this._drawn(each) }));
      if (!whole) {
        this.chart.setOption({ xAxis: { min: option.xAxis.min, max: option.xAxis.max, ...this._everySoManySeconds() }, series: series.map((each) => (isMark(each) ? { id: each.id, data: each.data, markLine: each.markLine, markArea: each.markArea } : { id: each.id, data: each.data, showSymbol: each.showSymbol, symbol: each.symbol })) }, { lazyUpdate: true });
      } else {
        this.chart.setOption({ ...option, ...this._functions(), series }, { notMerge: true });
      }
      if (this.on.note) this.on.note(this._omitted());
      return;
    }
    this.chart.setOption({ ...option, ...this._functions() }, { notMerge: true });
    if (kind === "bars") this._badBars();
  }

  _badBars() {
    const bad = this.extra.bad || [];
    if (!bad.length) return;
    // What is not finite has no length: a red label in its row says so.
    const axis = this.extra.horizontal ? "yAxis" : "xAxis";
    const wrong = new Set(bad.map((index) => String(this.option[axis].data[index])));
    this.chart.setOption({ [axis]: { axisLabel: { color: (value) => (wrong.has(String(value)) ? RED : LOOKS[this.dark ? "dark" : "light"].text) } } });
  }

  // Buttons, so that the keyboard reaches them, which hide and show curves.
  _legend() {
    const { legend = [], units = [], threshold } = this.kind === "lines" ? this.extra : {};
    const entry = (tag, label, color, dash, more = "") => {
      const element = document.createElement(tag);
      const swatch = document.createElement("i");
      swatch.style.borderTopStyle = dash;
      swatch.style.color = color || "currentColor";
      element.append(swatch, label);
      if (more) {
        const small = document.createElement("small");
        small.textContent = more;
        element.append(small);
      }
      return element;
    };
    const entries = legend.map(({ label, color, dash, axis }) => {
      const more = axis === null ? "" : [units.length < 2 || AS_ITSELF.has(units[axis]) ? "" : units[axis], axis > 0 ? "right" : ""].filter(Boolean).join(", ");
      if (legend.length === 1) return entry("span", label, color, dash, more);
      const button = entry("button", label, color, dash, more);
      button.type = "button";
      button.title = "Hide or show";
      button.setAttribute("aria-pressed", String(!this.hidden.has(label)));
      button.addEventListener("click", () => {
        if (!this.hidden.delete(label)) this.hidden.add(label);
        button.setAttribute("aria-pressed", String(!this.hidden.has(label)));
        this._show(false);
        if (this.on.hide) this.on.hide(label);
      });
      return button;
    });
    if (threshold !== null && threshold !== undefined) entries.push(entry("span", `clipped above ${format(threshold)}`, null, "dotted"));
    this.legend.replaceChildren(...entries);
  }

  _isHidden(series) {
    const id = series.id.slice(series.id.indexOf(":") + 1);
    return this.hidden.size > 0 && this.extra.legend.some(({ label, curves }) => this.hidden.has(label) && curves.includes(id));
  }

  _isLog(index) {
    return Boolean(this.extra.log && this.extra.log[index]);
  }

  // The part of a series that changes with its points. A point between two gaps is on no line: it alone has a dot.
  _drawn(series) {
    if (this._isHidden(series)) return { data: [], showSymbol: false, symbol: "emptyCircle" };
    const log = this._isLog(series.yAxisIndex);
    const data = this.data.get(series.id).map((point) => (point[1] === null || (log && point[1] <= 0) ? [point[0], null] : point));
    const isGap = (index) => index < 0 || index >= data.length || data[index][1] === null;
    const alone = data.flatMap((_, index) => (!isGap(index) && isGap(index - 1) && isGap(index + 1) ? [index] : []));
    for (const index of alone) data[index] = { value: data[index], symbol: "circle" };
    return { data, showSymbol: alone.length > 0, symbol: alone.length > 0 ? "none" : "emptyCircle" };
  }

  _leftOut() {
    return this.option.series.some((series) => !isMark(series) && this._isLog(series.yAxisIndex) && (this.data.get(series.id) || []).some((point) => point[1] !== null && point[1] <= 0));
  }

  // A mark where a curve stops being finite, at the height that it had last: those of the steps shown. Where there are too
  // many, each curve has its share, spread over these steps.
  _gaps(axis) {
    const { min = -Infinity, max = Infinity } = this.option.xAxis, log = this._isLog(axis), found = [];
    let usual = null;
    for (const { series, points, label } of this._curves()) {
      if ((series.yAxisIndex || 0) !== axis || this._isHidden(series)) continue;
      const gaps = [];
      let height = null, open = false;
      for (const point of points) {
        if (point[1] !== null) {
          if (!log || point[1] > 0) usual = height = point[1];
          open = false;
        } else if (!open) {
          open = true;
          if (point[0] >= min && point[0] <= max) gaps.push({ point, height, label });
        }
      }
      if (gaps.length) found.push(gaps);
    }
    found.sort((a, b) => a.length - b.length); // what those with few leave is for those with many
    let left = GAPS;
    const shown = found.flatMap((gaps, index) => {
      const some = thinned(gaps, Math.max(Math.floor(left / (found.length - index)), 1));
      left -= some.length;
      return some;
    });
    this.gaps.set(axis, [shown.length, found.reduce((sum, gaps) => sum + gaps.length, 0)]);
    // Those that were never finite before are where others are.
    return shown.map(({ point, height, label }) => ({ value: [point[0], height !== null ? height : usual === null ? 1 : usual], name: `${label} is ${format(point[2])} from ${this.extra.x === "step" ? "step " : ""}${formatX(point[0], this.extra.x)} on` }));
  }

  // What the chart does not show.
  _omitted() {
    const sums = [0, 1].map((each) => [...this.gaps.values()].reduce((sum, counts) => sum + counts[each], 0));
    return [this._leftOut() ? "zero and negative values are left out on the logarithmic axis" : "",
      sums[0] < sums[1] ? `${sums[0].toLocaleString("en")} of ${sums[1].toLocaleString("en")} marks of NaN and infinity` : ""].filter(Boolean).join(" · ");
  }

  // An axis of time is divided as a clock is.
  _everySoManySeconds() {
    const { min, max } = this.option.xAxis, least = (max - min) / (this.narrow ? 4 : 7);
    if (this.extra.x !== "time" || !(least > 1)) return {};
    return { interval: CLOCK.find((each) => each >= least) || 86400 * Math.ceil(least / 86400) };
  }

  // The curves themselves, the smoothed ones where there are any, with their points as they came.
  _curves() {
    const smoothed = new Set(this.option.series.filter((each) => each.id.startsWith("smooth:")).map((each) => each.id.slice(7)));
    return this.option.series.filter((each) => each.id.startsWith("smooth:") || (each.id.startsWith("line:") && !smoothed.has(each.id.slice(5)))).map((series) => ({ series, label: series.name, points: this.data.get(series.id) || [] }));
  }

  _functions() {
    const { option, extra, kind } = this;
    const unit = (index) => extra.units[index] || "1";
    if (kind === "lines") {
      return {
        xAxis: { ...option.xAxis, splitNumber: this.narrow ? 4 : 6, ...this._everySoManySeconds(), axisLabel: { ...option.xAxis.axisLabel, ...(extra.x === "clock" ? {} : { formatter: (value) => (extra.x === "time" ? timeLabel(value, option.xAxis.max - option.xAxis.min) : stepLabel(value, option.xAxis.min, option.xAxis.max)) }) } },
        yAxis: option.yAxis.map((axis, index) => ({ ...axis, ...(axis.type === "log" ? { min: ({ min, max }) => below(min < max ? min : min / 1.01), max: ({ min, max }) => above(min < max ? max : 1.01 * max) } : {}), axisLabel: { ...axis.axisLabel, formatter: (value) => tick(value, unit(index)) } })),
        tooltip: { ...option.tooltip, formatter: (params) => this._tip(params) },
      };
    }
    if (kind === "heat") {
      const ticks = this._ticks(option.xAxis.data);
      const end = (value) => format(Number((extra.log ? 10 ** value : value).toPrecision(3)), unit(0));
      return {
        tooltip: { ...option.tooltip, formatter: (param) => this._tipOfCell(param) },
        visualMap: { ...option.visualMap, text: [end(option.visualMap.max), end(option.visualMap.min)] },
        xAxis: { ...option.xAxis, axisLabel: { ...option.xAxis.axisLabel, interval: (index) => ticks.has(index), formatter: (value, index) => ticks.get(index) || "" } },
      };
    }
    const axis = extra.horizontal ? "xAxis" : "yAxis";
    return {
      [axis]: { ...option[axis], axisLabel: { ...option[axis].axisLabel, formatter: (value) => tick(value, unit(0)) } },
      tooltip: { ...option.tooltip, formatter: (params) => { const param = [params].flat()[0]; return this._lines(param.name, [[null, "", param.value === null || param.value === undefined ? "no finite value" : exact(param.value)]]); } },
    };
  }

  // Columns of a map with a label each: those in which a round step lies.
  _ticks(steps) {
    const ticks = new Map(), high = steps[steps.length - 1], size = round((high - steps[0]) / (this.narrow ? 4 : 9));
    steps.forEach((step, index) => {
      const next = index + 1 < steps.length ? steps[index + 1] : 2 * step - (steps[index - 1] || 0); // the last is as wide
      const inside = Math.ceil(step / size) * size;
      if (inside < next) ticks.set(index, stepLabel(inside, steps[0], high));
    });
    return ticks;
  }

  // Alarms that begin next to a place, or last there.
  _alarmsAt(x) {
    const marks = this.option.series.find(isMark), per = (this.option.xAxis.max - this.option.xAxis.min) / Math.max(this.element.clientWidth - 80, 1);
    if (!marks) return [];
    const near = marks.markLine.data.filter((mark) => mark.xAxis !== undefined && Math.abs(mark.xAxis - x) <= CLICK * per);
    const lasting = marks.markArea.data.filter(([from, to]) => from.xAxis <= x && x <= to.xAxis).map(([from]) => from);
    return [...new Set([...near, ...lasting].map((mark) => mark.name))];
  }

  // Each curve's point that is nearest to the mouse: with few points of each, they are not at the same steps.
  _tip(params) {
    const list = [params].flat();
    if (list.length && String(list[0].seriesId).startsWith("marks") && list[0].componentType === "series" && list.length === 1 && list[0].name) {
      return this._lines(list[0].name, []);
    }
    const x = list.length ? (list[0].axisValue !== undefined ? list[0].axisValue : list[0].value[0]) : 0;
    const alarms = this._alarmsAt(x).map((name) => [RED, name, ""]), bad = [], rows = [];
    for (const series of this.option.series) {
      const points = this.data.get(series.id);
      if (isMark(series) || !points || !points.length || this._isHidden(series)) continue;
      const point = nearest(points, x);
      const elsewhere = point[0] !== x ? `  (at ${formatX(point[0], this.extra.x)})` : "";
      (point[1] === null ? bad : rows).push([series.itemStyle.color, series.name, (point[1] === null ? format(point[2]) : exact(point[1])) + elsewhere]);
    }
    // Of too many rows the last ones are left out, so what is wrong comes first.
    return this._lines((this.extra.x === "step" ? "Step " : "") + formatX(x, this.extra.x), [...alarms, ...bad, ...rows]);
  }

  _tipOfCell(param) {
    const [column, row, , value] = param.value;
    const [first, last] = this.extra.steps[column].map((step) => step.toLocaleString("en"));
    const where = first === last ? `Step ${first}` : `Mean of steps ${first} to ${last}`;
    return this._lines(String(this.option.yAxis.data[row]), [[null, where, param.seriesId === "bad" ? "not finite" : format(value, this.extra.units[0])]]);
  }

  // A tooltip, built as nodes.
  _lines(title, rows) {
    const box = document.createElement("div");
    box.className = "iv-tip";
    const head = document.createElement("b");
    head.textContent = title;
    box.append(head);
    const shown = rows.length > ROWS ? [...rows.slice(0, ROWS - 1), [null, `${rows.length - ROWS + 1} more`, ""]] : rows;
    for (const [color, label, value] of shown) {
      const row = document.createElement("div");
      const dot = document.createElement("i");
      if (color) dot.style.background = color; else dot.style.display = "none";
      const name = document.createElement("span");
      name.textContent = label;
      const number = document.createElement("em");
      number.textContent = value;
      row.append(dot, name, number);
      box.append(row);
    }
    return box;
  }

  _area() {
    const model = this.chart && this.chart.getModel().getComponent("grid", 0);
    return model && model.coordinateSystem ? model.coordinateSystem.getRect() : null;
  }

  _mouse() {
    const zr = this.chart.getZr();
    const x = (pixel) => this.chart.convertFromPixel({ xAxisIndex: 0 }, pixel);
    if (this.kind === "heat") {
      zr.on("click", (event) => {
        if (!this.on.pick) return;
        const column = this.chart.convertFromPixel({ seriesIndex: 0 }, [event.offsetX, event.offsetY]);
        const steps = column && this.extra.steps[column[0]];
        if (steps && this._inside(event)) this.on.pick(steps[1]); // by which every layer of the column has its value
      });
      return;
    }
    if (this.kind !== "lines") return;
    let from = null, pan = false;
    zr.on("mousedown", (event) => {
      if (!this._inside(event) || event.event.button > 0 || event.event.touches) return;
      from = event.offsetX;
      pan = event.event.shiftKey;
      const end = (up) => {
        window.removeEventListener("mouseup", end);
        const to = up.clientX - this.element.getBoundingClientRect().left, start = from;
        from = null;
        this.band.style.display = "none";
        if (Math.abs(to - start) < CLICK || !this.on.zoom || !this.chart) return;
        const area = this._area();
        const limit = (pixel) => Math.min(Math.max(pixel, area.x), area.x + area.width);
        if (pan) {
          if (this.on.move) this.on.move(x(start) - x(to));
        } else {
          this.on.zoom(...[x(limit(start)), x(limit(to))].sort((a, b) => a - b));
        }
      };
      window.addEventListener("mouseup", end);
    });
    zr.on("mousemove", (event) => {
      const area = this._area();
      if (!area) return;
      if (this.on.hover) this.on.hover(this._inside(event) ? x(event.offsetX) : null);
      if (from !== null && !pan) {
        const to = Math.min(Math.max(event.offsetX, area.x), area.x + area.width);
        Object.assign(this.band.style, { display: "block", left: Math.min(from, to) + "px", width: Math.abs(to - from) + "px", top: area.y + "px", height: area.height + "px" });
      }
    });
    zr.on("globalout", () => this.on.hover && this.on.hover(null));
    zr.on("dblclick", () => this.on.zoom && this.on.zoom(null, null));
    this.element.onwheel = (event) => {
      // With Ctrl, as a touchpad's pinch has it: a plain wheel moves the page.
      if (!event.ctrlKey || !this.on.zoom) return;
      event.preventDefault();
      const { min, max } = this.option.xAxis, at = x(event.offsetX), factor = event.deltaY > 0 ? 1.4 : 1 / 1.4;
      this.on.zoom(at - (at - min) * factor, at + (max - at) * factor);
    };
  }

  // Two fingers zoom: what was below each of them stays there.
  _touch() {
    let held = null, places = null;
    const read = ({ touches }) => [...touches].slice(0, 2).map((touch) => touch.clientX - this.element.getBoundingClientRect().left);
    const at = (event) => {
      if (event.touches.length !== 2 || this.kind !== "lines" || !this.on.zoom || !this.chart) return;
      event.preventDefault();
      places = read(event);
      held = held || places.map((pixel) => this.chart.convertFromPixel({ xAxisIndex: 0 }, pixel));
    };
    const end = () => {
      const area = this._area();
      if (held && area && Math.abs(places[0] - places[1]) > CLICK) {
        const per = (held[0] - held[1]) / (places[0] - places[1]), low = held[0] - (places[0] - area.x) * per;
        if (per > 0) this.on.zoom(low, low + area.width * per);
      }
      held = null;
    };
    this.element.addEventListener("touchstart", at, { passive: false });
    this.element.addEventListener("touchmove", at, { passive: false });
    this.element.addEventListener("touchend", end);
    this.element.addEventListener("touchcancel", () => { held = null; });
  }

  _inside(event) {
    const area = this._area();
    return area && event.offsetX >= area.x && event.offsetX <= area.x + area.width && event.offsetY >= area.y && event.offsetY <= area.y + area.height;
  }
}

function isMark(series) {
  return series.id.startsWith("marks");
}

// At most so many of the gaps of a curve: the first one in each of as many equal stretches.
function thinned(gaps, most) {
  if (gaps.length <= most) return gaps;
  const low = gaps[0].point[0], width = (gaps[gaps.length - 1].point[0] - low) / most || 1;
  const at = ({ point }) => Math.min(Math.floor((point[0] - low) / width), most - 1);
  return gaps.filter((gap, index) => index === 0 || at(gap) !== at(gaps[index - 1]));
}

function nearest(points, x) {
  let low = 0, high = points.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (points[middle][0] < x) low = middle + 1; else high = middle;
  }
  return low > 0 && Math.abs(points[low - 1][0] - x) <= Math.abs(points[low][0] - x) ? points[low - 1] : points[low];
}
