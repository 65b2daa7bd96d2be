// Two charts on canvases: answers per second by tier, and latencies against the deadline.

import { TIERS } from "./text.js"

export const SPAN_S = 90
const LEFT = 34
const BOTTOM = 18
const TOP = 8
const MAX_STEP_S = 5
const [MIN_MS, MAX_MS] = [0.2, 2_000]

export class Chart {
  constructor(canvas) {
    this.canvas = canvas
    this.pen = canvas.getContext("2d")
    this.height = Number(canvas.getAttribute("height"))
  }

  begin() {
    const ratio = devicePixelRatio || 1
    const width = this.canvas.clientWidth
    if (this.canvas.width !== Math.round(width * ratio)) {
      this.canvas.width = Math.round(width * ratio)
      this.canvas.height = Math.round(this.height * ratio)
      this.canvas.style.height = `${this.height}px`
    }
    this.width = width
    this.colour = colours()
    const pen = this.pen
    pen.setTransform(ratio, 0, 0, ratio, 0, 0)
    pen.clearRect(0, 0, width, this.height)
    pen.font = "11px system-ui, sans-serif"
    pen.lineJoin = "round"
  }

  x(ageS) {
    return LEFT + (this.width - LEFT - 4) * (1 - ageS / SPAN_S)
  }

  // Horizontal lines with labels at the left, and the time axis below.
  frame(marks) {
    const { pen } = this
    pen.textAlign = "right"
    pen.textBaseline = "middle"
    for (const [y, text] of marks) {
      pen.strokeStyle = this.colour.line
      pen.lineWidth = 1
      line(pen, LEFT, y, this.width - 4, y)
      pen.fillStyle = this.colour.soft
      pen.fillText(text, LEFT - 6, y)
    }
    pen.textBaseline = "bottom"
    for (const age of [60, 30, 0]) {
      pen.textAlign = age === 0 ? "right" : "center"
      pen.fillText(age === 0 ? "now" : `${age} s ago`, this.x(age), this.height)
    }
  }
}

// `steps`: {ageS, rates by tier}, oldest first.
export function drawMix(chart, steps) {
  chart.begin()
  const { pen, height } = chart
  const peak = niceAbove(Math.max(2, ...steps.map((step) => TIERS.reduce((sum, tier) => sum + step.rates[tier], 0))))
  const y = (rate) => height - BOTTOM - ((height - BOTTOM - TOP) * rate) / peak
  chart.frame([[y(0), "0"], [y(peak / 2), short(peak / 2)], [y(peak), short(peak)]])
  const floor = steps.map(() => 0)
  pen.save()
  clip(chart)
  for (const tier of [...TIERS].reverse()) {
    const roof = steps.map((step, place) => floor[place] + step.rates[tier])
    band(chart, steps, floor, roof, y, chart.colour[tier])
    roof.forEach((value, place) => (floor[place] = value))
  }
  pen.restore()
}

// `dots`: {atS, tier, ms}; `steps`: {ageS, p99}; times are seconds of performance.now().
export function drawLatency(chart, dots, steps, deadlineMs, nowS) {
  chart.begin()
  const { pen, height } = chart
  const [low, high] = [Math.log(MIN_MS), Math.log(MAX_MS)]
  const y = (ms) => height - BOTTOM - ((height - BOTTOM - TOP) * (Math.log(Math.min(MAX_MS, Math.max(MIN_MS, ms))) - low)) / (high - low)
  chart.frame([[y(1), "1 ms"], [y(10), "10"], [y(100), "100"], [y(1_000), "1 s"]])
  pen.fillStyle = chart.colour.danger
  pen.globalAlpha = 0.07
  pen.fillRect(LEFT, TOP, chart.width - LEFT - 4, y(deadlineMs) - TOP)
  pen.globalAlpha = 0.75
  for (const dot of dots) {
    pen.fillStyle = chart.colour[dot.tier]
    pen.beginPath()
    pen.arc(chart.x(nowS - dot.atS), y(dot.ms), 2, 0, 7)
    pen.fill()
  }
  pen.globalAlpha = 1
  pen.strokeStyle = chart.colour.ink
  pen.lineWidth = 1.5
  trace(chart, steps, y)
  pen.strokeStyle = chart.colour.danger
  pen.setLineDash([6, 4])
  line(pen, LEFT, y(deadlineMs), chart.width - 4, y(deadlineMs))
  pen.setLineDash([])
  pen.fillStyle = chart.colour.danger
  pen.textAlign = "left"
  pen.textBaseline = "bottom"
  pen.fillText(`deadline ${deadlineMs} ms`, LEFT + 6, y(deadlineMs) - 2)
}

function band(chart, steps, floor, roof, y, colour) {
  const { pen } = chart
  if (!steps.length || roof.every((value, place) => value === floor[place])) return
  pen.fillStyle = colour
  pen.beginPath()
  steps.forEach((step, place) => pen.lineTo(chart.x(step.ageS), y(roof[place])))
  for (let place = steps.length - 1; place >= 0; place -= 1) pen.lineTo(chart.x(steps[place].ageS), y(floor[place]))
  pen.closePath()
  pen.fill()
}

function trace(chart, steps, y) {
  const { pen } = chart
  let isDown = false
  pen.save()
  clip(chart)
  pen.beginPath()
  for (const step of steps) {
    if (step.p99 === null || step.spanS > MAX_STEP_S) isDown = false
    else {
      const place = [chart.x(step.ageS), y(step.p99)]
      if (isDown) pen.lineTo(...place)
      else pen.moveTo(...place)
      isDown = true
    }
  }
  pen.stroke()
  pen.restore()
}

function clip(chart) {
  chart.pen.beginPath()
  chart.pen.rect(LEFT, 0, chart.width - LEFT - 3, chart.height)
  chart.pen.clip()
}

function line(pen, fromX, fromY, toX, toY) {
  pen.beginPath()
  pen.moveTo(fromX, fromY)
  pen.lineTo(toX, toY)
  pen.stroke()
}

function niceAbove(value) {
  const scale = 10 ** Math.floor(Math.log10(value))
  return [1, 1.5, 2, 3, 4, 6, 8, 10].map((factor) => factor * scale).find((bound) => bound >= value)
}

const short = (rate) => (Number.isInteger(rate) ? String(rate) : rate.toFixed(1))

let cached = null

export const resetColours = () => (cached = null)

function colours() {
  if (cached === null) {
    const probe = document.body.appendChild(document.createElement("i")) // a canvas resolves neither variables nor light-dark()
    const computed = (name) => {
      probe.style.color = `var(--${name})`
      return getComputedStyle(probe).color
    }
    cached = Object.fromEntries([...TIERS, "ink", "soft", "line", "danger"].map((name) => [name, computed(name)]))
    probe.remove()
  }
  return cached
}
