// The controls: drills, a load generator and the deadline, and the charts that show their effect.

import { post, recommend } from "./api.js"
import { Chart, SPAN_S, drawLatency, drawMix, resetColours } from "./charts.js"
import { announce, byId, make, prefersReducedMotion, setText } from "./dom.js"
import { elapsedMs } from "./session.js"
import { TIERS, milliseconds, percent, tierTitle } from "./text.js"
import { themeChanged } from "./theme.js"

const RATES = [0, 5, 10, 25, 50, 100, 200, 400]
const TICK_MS = 20
const MAX_IN_FLIGHT = 128
const DEADLINES_MS = [10, 20, 50, 100, 200, 500, 1_000]
const SETTLING_MS = 2_000
const MAX_DOTS = 6_000
const PARTS = { llm: "language model", features: "feature store" }

const pick = (list) => list[Math.floor(Math.random() * list.length)]

// Sends requests at a chosen rate, whether or not earlier ones have returned (open loop).
class LoadGenerator extends EventTarget {
  rate = 0
  sent = 0
  answered = 0
  late = 0
  refused = 0
  unsent = 0
  #inFlight = 0
  #timer = 0
  #due = 0
  #lastTickMs = 0
  #items = []
  #users = []

  // Adds items to the histories of generated users, and sets the known users that are mixed in.
  addMaterial(itemIds, userIds = []) {
    this.#items = [...new Set([...this.#items, ...itemIds])].slice(-200)
    if (userIds.length) this.#users = userIds
  }

  set(rate, deadlineMs) {
    this.rate = rate
    this.#deadline = deadlineMs
    clearInterval(this.#timer)
    if (rate === 0) return
    this.sent = this.answered = this.late = this.refused = this.unsent = 0
    this.#lastTickMs = performance.now()
    this.#timer = setInterval(() => this.#tick(), TICK_MS)
  }

  #deadline = () => 200

  #tick() {
    const now = performance.now()
    this.#due += (this.rate * (now - this.#lastTickMs)) / 1000
    this.#lastTickMs = now
    for (; this.#due >= 1; this.#due -= 1) {
      if (this.#inFlight >= MAX_IN_FLIGHT || this.#items.length === 0) this.unsent += 1
      else this.#send()
    }
  }

  async #send() {
    this.#inFlight += 1
    this.sent += 1
    const deadlineMs = this.#deadline()
    try {
      const answer = await recommend({ ...this.#randomUser(), k: 10, deadline_ms: deadlineMs }, { priority: "low" })
      const ms = elapsedMs(answer)
      this.answered += 1
      if (ms > deadlineMs) this.late += 1
      this.dispatchEvent(new CustomEvent("answer", { detail: { tier: answer.tier, ms } }))
    } catch {
      this.refused += 1
    } finally {
      this.#inFlight -= 1
    }
  }

  // A fifth are known users, a fifth have one or two items, the rest have four to twelve.
  #randomUser() {
    const chance = Math.random()
    if (chance < 0.2 && this.#users.length) return { user_id: pick(this.#users) }
    const length = chance < 0.4 ? 1 + Math.floor(2 * Math.random()) : 4 + Math.floor(9 * Math.random())
    return { recent_item_ids: Array.from({ length }, () => pick(this.#items)) }
  }
}

export const load = new LoadGenerator()
const drillsChanged = new EventTarget()
let drills = {}
let settledAtMs = 0
let steps = []
let stepsAtS = 0
let deadlineMs = 200
const dots = []
const nowS = () => performance.now() / 1000

export function startControls(session) {
  for (const part of Object.keys(PARTS)) byId(`switch-${part}`).addEventListener("click", () => flip(part))
  byId("load").addEventListener("input", () => setLoad(session))
  byId("deadline").addEventListener("input", () => setDeadline(session))
  load.addEventListener("answer", ({ detail }) => addDot(detail))
  session.addEventListener("answer", ({ detail }) => {
    addDot({ tier: detail.answer.tier, ms: elapsedMs(detail.answer) })
    load.addMaterial(detail.answer.items.map((item) => item.item_id))
    showHint(detail.answer)
  })
  session.addEventListener("history", ({ detail }) => detail.history && load.addMaterial(detail.history.items.map((item) => item.item_id)))
  drillsChanged.addEventListener("changed", () => {
    session.isStoreOff = "features" in drills
    session.requestRepeatedly()
    setTimeout(() => session.readHistory(), session.isStoreOff ? 0 : 400)
  })
  themeChanged.addEventListener("changed", resetColours)
  keepDrawing()
}

export function changeLoad(by, session) {
  const dial = byId("load")
  dial.value = String(Number(dial.value) + by)
  setLoad(session)
}

// Shows the live view: the drills and the steps of the charts.
export function showLive(live) {
  steps = live.steps
    .filter((step) => step.age_s <= SPAN_S + 5)
    .map((step) => ({ age: step.age_s, rates: step.rates, spanS: step.span_s, p99: step.p99_ms }))
  stepsAtS = nowS()
  // Just after a switch, the answering gateway may not have read the change yet.
  if (performance.now() > settledAtMs) showDrills(live.drills)
  showLegend()
}

function showDrills(running) {
  const hasChanged = Object.keys(PARTS).some((part) => part in drills !== part in running)
  drills = running
  if (hasChanged) drillsChanged.dispatchEvent(new Event("changed"))
  for (const part of Object.keys(PARTS)) {
    const isOff = part in drills
    const button = byId(`switch-${part}`)
    button.setAttribute("aria-checked", String(!isOff))
    setText(button.querySelector("small"), isOff ? `off; back in ${clock(drills[part])}` : "on")
  }
}

const clock = (seconds) => `${Math.floor(seconds / 60)}:${String(Math.floor(seconds % 60)).padStart(2, "0")}`

export async function flip(part) {
  const wanted = part in drills ? "on" : "off"
  try {
    const answer = await post("/console/drills", { [part]: wanted }, { priority: "high" })
    settledAtMs = performance.now() + SETTLING_MS
    showDrills(answer.drills)
    announce(`The ${PARTS[part]} is ${wanted}.`)
    setText(byId("drill-note"), "")
  } catch (error) {
    setText(byId("drill-note"), error.status === 403 ? "This key lacks the scope admin, which drills need." : `Nothing was switched: ${error.message}.`)
  }
}

function showHint(answer) {
  const isHidden = "llm" in drills && answer.tier === "precomputed"
  setText(byId("drill-note"), isHidden ? "The stored list needs no language model. Click an item to make the list outdated." : "")
}

function setLoad(session) {
  const rate = RATES[byId("load").value]
  load.set(rate, () => session.deadlineMs)
  setText(byId("load-out"), rate === 0 ? "off" : `${rate}/s`)
  if (rate === 0) showLoad()
}

function setDeadline(session) {
  session.deadlineMs = DEADLINES_MS[byId("deadline").value]
  setText(byId("deadline-out"), `${session.deadlineMs} ms`)
  deadlineMs = session.deadlineMs
  session.request()
}

function addDot({ tier, ms }) {
  dots.push({ atS: nowS(), tier, ms })
}

function showLoad() {
  if (load.sent === 0) return
  const inTime = load.answered ? (load.answered - load.late) / load.answered : null
  const parts = [`${load.answered.toLocaleString("en")} answered`, `${percent(inTime)} in time`]
  if (load.refused) parts.push(`${load.refused.toLocaleString("en")} refused`)
  if (load.unsent) parts.push(`${load.unsent.toLocaleString("en")} more than this browser can send`)
  setText(byId("load-note"), `Load from this page: ${parts.join(", ")}.`)
}

function showLegend() {
  const last = steps.slice(-3)
  const mean = (tier) => last.reduce((sum, step) => sum + step.rates[tier], 0) / Math.max(1, last.length)
  const entries = TIERS.map((tier) => make("span", {}, make("i", { class: "swatch", data: { tier } }), `${tierTitle(tier)} `, make("b", {}, mean(tier).toFixed(mean(tier) < 10 ? 1 : 0))))
  byId("mix-text").replaceChildren(...entries)
  const p99 = steps.findLast((step) => step.p99 !== null)?.p99
  setText(byId("latency-text"), `The line is the 99th percentile of all requests: ${milliseconds(p99)} of ${deadlineMs} ms.`)
}

function keepDrawing() {
  const [mix, latency] = [new Chart(byId("mix")), new Chart(byId("latency"))]
  const draw = () => {
    if (!document.hidden) {
      while (dots.length && nowS() - dots[0].atS > SPAN_S) dots.shift()
      if (dots.length > MAX_DOTS) dots.splice(0, dots.length - MAX_DOTS)
      const aged = steps.map((step) => ({ ...step, ageS: step.age + nowS() - stepsAtS }))
      drawMix(mix, aged)
      drawLatency(latency, dots, aged, deadlineMs, nowS())
      if (load.rate) showLoad()
    }
    setTimeout(draw, prefersReducedMotion() ? 1_000 : 120)
  }
  draw()
}
