// Names and releases: each name's live version, its release with the last analysis result, and the moves, each with a confirmation.

import { get, post } from "./api.js"
import { announce, byId, failureText, make, setText } from "./dom.js"
import { ago, plural } from "./text.js"

const USUAL_STAGES = "1%:10m, 5%:30m, 25%:1h, 100%"
const UNITS_S = { s: 1, m: 60, h: 3_600, d: 86_400 }
const GOOD = ["no worse", "better"]
let shown = "" // the displayed state as JSON: without a change, the page is not rebuilt under its user
let pending = null // the move that awaits confirmation

export function startReleases() {
  const dialog = byId("move-dialog")
  dialog.addEventListener("close", () => {
    const move = pending
    pending = null
    if (dialog.returnValue === "move" && move) run(move, byId("move-reason").value.trim())
  })
}

export async function loadReleases() {
  try {
    show(await get("/console/names"))
  } catch (error) {
    setText(byId("releases-note"), error.status === 401 ? "" : failureText(error, "The names could not be read"))
  }
}

function show(state) {
  const text = JSON.stringify(state)
  if (text === shown || isFilledIn()) return
  shown = text
  byId("releases").replaceChildren(...state.names.map((name) => block(name, state.versions)))
  if (!state.names.length) setText(byId("releases-note"), "No name serves anything yet: the first promotion makes one.")
}

const isFilledIn = () => byId("move-dialog").open || byId("releases").contains(document.activeElement)

async function run({ path, body, done }, reason) {
  try {
    const state = await post(path, "reason" in body ? { ...body, reason } : body)
    document.activeElement?.blur()
    show(state)
    setText(byId("releases-note"), done)
    byId("releases-note").dataset.kind = "good"
    announce(done)
  } catch (error) {
    setText(byId("releases-note"), failureText(error, "Nothing was moved"))
    byId("releases-note").dataset.kind = "bad"
  }
}

function ask(title, about, move) {
  pending = move
  setText(byId("move-title"), title)
  setText(byId("move-about"), about)
  byId("move-reason-line").hidden = !("reason" in move.body)
  byId("move-reason").value = ""
  byId("move-dialog").returnValue = ""
  byId("move-dialog").showModal()
}

function block(name, versions) {
  const withdrawn = new Set(name.withdrawn.map((one) => one.version))
  const since = name.history.find((move) => move.version === name.live && ["promote", "rollback"].includes(move.act))
  const facts = [
    since ? `live since ${when(since.at)}, by ${since.by}` : null,
    name.previous ? `before it ${name.previous}${withdrawn.has(name.previous) ? ", withdrawn" : ""}` : null,
    name.reference ? `reference ${name.reference}` : null,
    name.owner ? `owner ${name.owner}` : null,
  ].filter(Boolean)
  const back = button("Roll back…", () => askRollback(name), { class: "danger", disabled: !name.previous || name.previous === name.live })
  return make(
    "article",
    { class: "name", data: { name: name.name } },
    make("div", { class: "head" }, make("h3", {}, name.name), make("code", {}, name.live ?? "nothing live"), back),
    make("p", { class: "note" }, facts.join(" · ")),
    name.canary ? release(name) : beginForm(name, versions.filter((version) => version !== name.live && !withdrawn.has(version))),
    name.withdrawn.length ? details(`Withdrawn (${name.withdrawn.length})`, name.withdrawn.map(withdrawal)) : null,
    details(`History (${plural(name.history.length, "move")})`, name.history.map(moved)),
  )
}

function release(name) {
  const { canary } = name
  const next = canary.stages[canary.stage + 1]
  const at = (verb) => `/console/names/${name.name}/versions/${canary.version}:${verb}`
  const now = Date.now() < canary.since_ms ? `stage ${canary.stage + 1} begins in ${Math.ceil((canary.since_ms - Date.now()) / 1_000)} s` : `${share(canary.share)} of the users have it`
  const track = make("ol", { class: "stages", "aria-label": "Stages" }, ...canary.stages.map((stage, place) => stageChip(stage, place, canary)))
  const moves = make(
    "div",
    { class: "acts" },
    next ? button(`On to ${share(next.share)}`, () => ask(`On to ${share(next.share)} of the users?`, `${canary.version} goes to more users of ${name.name}, without waiting for a verdict.`, { path: at("stage"), body: { seen: canary.id, stage: canary.stage + 1 }, done: `${canary.version} is on its way to ${share(next.share)}.` })) : null,
    button("Make live…", () => askPromote(name, canary.version), {}),
    button("End…", () => ask(`End the release of ${canary.version}?`, `All users of ${name.name} get ${name.live} again. The candidate may be released later.`, { path: at("stop"), body: { seen: canary.id, withdraw: false, reason: "" }, done: `The release of ${canary.version} has ended.` }), {}),
    button("Withdraw…", () => ask(`Withdraw ${canary.version}?`, `The release ends, and it does not go live under ${name.name} again without force.`, { path: at("stop"), body: { seen: canary.id, withdraw: true, reason: "" }, done: `${canary.version} is withdrawn.` }), { class: "danger" }),
  )
  const how = canary.by_hand ? "goes on by hand" : "goes on by its verdicts"
  return make("section", { class: "release", "aria-label": `Release of ${canary.version}` }, make("p", {}, make("strong", {}, "Candidate "), make("code", {}, canary.version), ` ${now}; begun by ${canary.by} ${when(canary.at)}, ${how}.`), track, ...verdict(canary), moves)
}

function stageChip(stage, place, canary) {
  const state = place < canary.stage ? "done" : place === canary.stage ? "now" : "next"
  const chip = make("li", { data: { state } }, share(stage.share), make("small", {}, ` ${duration(stage.hold_s)}`))
  if (state === "now") chip.setAttribute("aria-current", "step")
  return chip
}

function verdict({ verdict: found, looked_ms: lookedMs }) {
  if (!found) return [make("p", { class: "note" }, "No look at it yet.")]
  const users = found.act ? `, ${found.users[0].toLocaleString("en")} users against ${found.users[1].toLocaleString("en")}` : ""
  const reason = withoutGuards(found)
  const head = make("p", { class: "outcome", data: { kind: found.outcome === "worse" ? "bad" : GOOD.includes(found.outcome) ? "good" : "" } }, make("strong", {}, `Verdict: ${!found.outcome || found.outcome === "continue" ? "none yet" : found.outcome}`), `${reason ? `: ${reason}` : ""} (looked ${lookedMs ? ago(lookedMs) : "never"}${users})`)
  return found.guards?.length ? [head, make("div", { class: "scroll", tabIndex: 0, role: "region", "aria-label": "Guard metrics" }, guards(found.guards))] : [head]
}

// The reason without the guards' lines about missing data.
function withoutGuards({ reason = "", guards: rows = [] }) {
  const places = rows.filter((row) => row.lacks).map((row) => reason.indexOf(`${row.name}: `)).filter((place) => place >= 0)
  return places.length ? reason.slice(0, Math.min(...places)).replace(/; $/, "") : reason
}

function guards(rows) {
  const head = make("tr", {}, ...["Guard", "Worse by", "Interval", "State"].map((text) => make("th", { scope: "col" }, text)))
  const lines = rows.map((row) =>
    make("tr", {}, make("th", { scope: "row" }, row.name.replaceAll("_", " ").replace(":", ", ")), make("td", { class: "figure" }, signed(row.worse_by)), make("td", { class: "figure" }, row.low === null && row.high === null ? "–" : `${row.low === null ? "−∞" : signed(row.low)} to ${row.high === null ? "∞" : signed(row.high)}`), make("td", { class: "state", data: { health: row.state === "worse" ? "bad" : GOOD.includes(row.state) ? "good" : "" } }, row.state, row.lacks ? make("small", {}, ` ${row.lacks.replace(`${row.name}: `, "")}`) : null)),
  )
  return make("table", { class: "guards" }, make("thead", {}, head), make("tbody", {}, ...lines))
}

function beginForm(name, candidates) {
  if (!candidates.length) return make("p", { class: "note" }, "There is no other version to release: `tailrace pipeline` makes one.")
  const id = (part) => `${part}-${name.name}`
  const version = make("select", { id: id("version") }, ...candidates.map((one) => make("option", { value: one }, one)))
  const stages = make("input", { id: id("stages"), value: USUAL_STAGES, autocomplete: "off", spellcheck: false })
  const byHand = make("input", { id: id("by-hand"), type: "checkbox" })
  const field = (text, input) => make("span", {}, make("label", { htmlFor: input.id }, text), input)
  const begin = () => {
    const body = { stages: parseStages(stages.value), by_hand: byHand.checked }
    if (body.stages.includes(null)) return setText(byId("releases-note"), `Nothing was moved: write shares of users and how long each lasts at least, such as ${USUAL_STAGES}.`)
    ask(`Release ${version.value}?`, `${share(body.stages[0].share)} of the users of ${name.name} get it beside ${name.live}; where it is worse, it is rolled back by itself.`, { path: `/console/names/${name.name}/versions/${version.value}:release`, body, done: `The release of ${version.value} begins.` })
  }
  const form = make("form", { class: "trial" }, field("Version", version), field("Shares of users, and for how long at least", stages), make("span", { class: "check" }, byHand, make("label", { htmlFor: byHand.id }, "by hand")), make("button", { class: "main" }, "Release…"), button("Make live…", () => askPromote(name, version.value), {}))
  form.addEventListener("submit", (event) => {
    event.preventDefault()
    begin()
  })
  return form
}

function askPromote(name, version) {
  ask(`Make ${version} live?`, `All users of ${name.name} get it at once, instead of ${name.live ?? "nothing"}.`, { path: `/console/names/${name.name}/versions/${version}:promote`, body: { seen: name.live }, done: `${version} is live as ${name.name}.` })
}

function askRollback(name) {
  ask(`Roll ${name.name} back?`, `${name.live} is withdrawn, and the version before it is live again for all users.`, { path: `/console/names/${name.name}:rollback`, body: { seen: name.live, to: null, reason: "" }, done: `${name.name} is rolled back.` })
}

function button(text, onclick, properties = {}) {
  return make("button", { type: "button", onclick, ...properties }, text)
}

// Stages in the format of `tailrace release --stages`; null if invalid.
function parseStages(text) {
  return text.split(",").map((part) => {
    const [, percent, number, unit] = part.trim().match(/^(\d+(?:\.\d+)?)\s*%(?:\s*:\s*(\d+(?:\.\d+)?)([smhd]))?$/) ?? []
    return percent === undefined ? null : { share: Number(percent) / 100, hold_s: number === undefined ? 0 : Number(number) * UNITS_S[unit] }
  })
}

const details = (title, rows) => make("details", {}, make("summary", {}, title), make("ul", {}, ...rows))
const withdrawal = (one) => make("li", {}, make("code", {}, one.version), make("small", {}, ` ${when(one.at)}, by ${one.by}: ${one.reason || "no reason given"}`))
const moved = (move) => make("li", {}, make("strong", {}, move.act), " ", make("code", {}, move.version ?? "–"), make("small", {}, ` ${when(move.at)}, by ${move.by}${move.note ? `: ${move.note}` : ""}`))
const when = (at) => ago(Date.parse(at))
const share = (value) => `${Number((100 * value).toPrecision(3))}\u00a0%`
const signed = (value) => (value === null || value === undefined ? "–" : value > 10 ? "over +1,000\u00a0%" : `${value < 0 ? "−" : "+"}${(100 * Math.abs(value)).toFixed(1)}\u00a0%`)
const duration = (seconds) => (seconds === 0 ? "" : seconds >= 7_200 ? `${Number((seconds / 3_600).toPrecision(3))} h` : seconds >= 120 ? `${Math.round(seconds / 60)} min` : `${seconds} s`)
