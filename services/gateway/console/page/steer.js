// Disturbing it: the switches, the load, the deadline, and the charts that show what follows.

import { post } from "./api.js"
import { Chart, SPAN_S, drawMix, drawSpeed, forgetColours } from "./charts.js"
import { announce, byId, make, prefersStill, setText } from "./dom.js"
import { Load, RATES } from "./load.js"
import { takenMs } from "./session.js"
import { themeChanged } from "./theme.js"
import { TIERS, tierTitle, milliseconds, percent } from "./words.js"

const DEADLINES = [10, 20, 50, 100, 200, 500, 1_000]
const SETTLING_MS = 2_000
const NAMES = { llm: "language model", features: "feature store" }

export const load = new Load()
const drillsChanged = new EventTarget()
let off = {}
let settledAtMs = 0
let moments = []
let momentsAtS = 0
const dots = []
const nowS = () => performance.now() / 1000

export function startSteer(session) {
  for (const part of Object.keys(NAMES)) byId(`switch-${part}`).addEventListener("click", () => flip(part, session))
  byId("load").addEventListener("input", () => setLoad(session))
  byId("deadline").addEventListener("input", () => setDeadline(session))
  load.addEventListener("answer", ({ detail }) => remember(detail))
  session.addEventListener("answer", ({ detail }) => {
    remember({ tier: detail.answer.tier, ms: takenMs(detail.answer) })
    load.learn(detail.answer.items.map((item) => item.item_id))
    hint(detail.answer)
  })
  session.addEventListener("history", ({ detail }) => detail.history && load.learn(detail.history.items.map((item) => item.item_id)))
  drillsChanged.addEventListener("changed", () => {
    session.isStoreOff = "features" in off
    session.askSoon()
    setTimeout(() => session.readHistory(), session.isStoreOff ? 0 : 400)
  })
  themeChanged.addEventListener("changed", forgetColours)
  keepDrawing()
}


export function turnLoad(by, session) {
  const dial = byId("load")
  dial.value = String(Number(dial.value) + by)
  setLoad(session)
}

// Takes the live view: which parts are off, and the charts' steps.
export function takeLive(live) {
  moments = live.moments
    .filter((moment) => moment.age_s <= SPAN_S + 5)
    .map((moment) => ({ age: moment.age_s, rates: moment.rates, spanS: moment.span_s, p99: moment.p99_ms }))
  momentsAtS = nowS()
  // For a moment after a switch, the gateway that tells of all may not have heard of it.
  if (performance.now() > settledAtMs) showDrills(live.drills)
  showLegend()
}

function showDrills(drills) {
  const hasChanged = Object.keys(NAMES).some((part) => part in off !== part in drills)
  off = drills
  if (hasChanged) drillsChanged.dispatchEvent(new Event("changed"))
  for (const part of Object.keys(NAMES)) {
    const isOff = part in drills
    const button = byId(`switch-${part}`)
    button.setAttribute("aria-checked", String(!isOff))
    setText(button.querySelector("small"), isOff ? `off; back in ${clock(drills[part])}` : "on")
  }
}

const clock = (seconds) => `${Math.floor(seconds / 60)}:${String(Math.floor(seconds % 60)).padStart(2, "0")}`

export async function flip(part, session) {
  const wanted = part in off ? "on" : "off"
  try {
    const { drills } = await post("/console/drills", { [part]: wanted }, { priority: "high" })
    settledAtMs = performance.now() + SETTLING_MS
    showDrills(drills)
    announce(`The ${NAMES[part]} is ${wanted}.`)
    setText(byId("steer-note"), "")
  } catch (error) {
    setText(byId("steer-note"), error.status === 403 ? "This key may not switch parts off: it lacks the scope admin." : `Nothing was switched: ${error.message}.`)
  }
}

function hint(answer) {
  const isMasked = "llm" in off && answer.tier === "precomputed"
  setText(byId("steer-note"), isMasked ? "The stored list needs no language model. Click an item to make it stale." : "")
}

function setLoad(session) {
  const rate = RATES[byId("load").value]
  load.set(rate, () => session.deadlineMs)
  setText(byId("load-out"), rate === 0 ? "off" : `${rate} a second`)
  if (rate === 0) showLoad()
}

function setDeadline(session) {
  session.deadlineMs = DEADLINES[byId("deadline").value]
  setText(byId("deadline-out"), `${session.deadlineMs} ms`)
  deadlineMs = session.deadlineMs
  session.ask()
}

let deadlineMs = 200

function remember({ tier, ms }) {
  dots.push({ atS: nowS(), tier, ms })
}

function showLoad() {
  if (load.sent === 0) return
  const inTime = load.answered ? (load.answered - load.late) / load.answered : null
  const parts = [`${load.answered.toLocaleString("en")} answered`, `${percent(inTime)} in time`]
  if (load.refused) parts.push(`${load.refused.toLocaleString("en")} refused`)
  if (load.unsent) parts.push(`${load.unsent.toLocaleString("en")} more than this browser can send`)
  setText(byId("load-note"), `This page: ${parts.join(", ")}.`)
}

function showLegend() {
  const last = moments.slice(-3)
  const mean = (tier) => last.reduce((sum, moment) => sum + moment.rates[tier], 0) / Math.max(1, last.length)
  const entries = TIERS.map((tier) => make("span", {}, make("i", { class: "swatch", data: { tier } }), `${tierTitle(tier)} `, make("b", {}, mean(tier).toFixed(mean(tier) < 10 ? 1 : 0))))
  byId("mix-text").replaceChildren(...entries)
  const p99 = moments.findLast((moment) => moment.p99 !== null)?.p99
  setText(byId("speed-text"), `The line is the 99th percentile of all callers: ${milliseconds(p99)} of ${deadlineMs} ms.`)
}

function keepDrawing() {
  const [mix, speed] = [new Chart(byId("mix")), new Chart(byId("speed"))]
  const draw = () => {
    if (!document.hidden) {
      while (dots.length && nowS() - dots[0].atS > SPAN_S) dots.shift()
      if (dots.length > 6_000) dots.splice(0, dots.length - 6_000)
      const aged = moments.map((moment) => ({ ...moment, ageS: moment.age + nowS() - momentsAtS }))
      drawMix(mix, aged)
      drawSpeed(speed, dots, aged, deadlineMs, nowS())
      if (load.rate) showLoad()
    }
    setTimeout(draw, prefersStill() ? 1_000 : 120)
  }
  draw()
}
