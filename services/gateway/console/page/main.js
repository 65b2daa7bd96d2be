// The console: puts the parts together, and reads the live view once a second while somebody looks.

import { dropKey, get, hasKey, keepKey, keyNeeded } from "./api.js"
import { clickPlace, startAnswer } from "./answer.js"
import { loadBundle } from "./bundle.js"
import { byId, make, setText } from "./dom.js"
import { openHelp, startKeys } from "./keys.js"
import { loadPeople, startPeople } from "./people.js"
import { showPromises } from "./promises.js"
import { Session } from "./session.js"
import { flip, load, startSteer, takeLive, turnLoad } from "./steer.js"
import { nextTheme, startTheme } from "./theme.js"
import { startTimeline } from "./timeline.js"
import { TIERS, tierTitle, tierMeaning } from "./words.js"

const LIVE_EVERY_MS = 1_000
const BUNDLE_EVERY = 15
const session = new Session()

function pulse(state, text) {
  byId("pulse").dataset.state = state
  setText(byId("pulse-text"), text)
}

async function lookOnce(turn) {
  try {
    const live = await get("/console/live", { priority: "high" })
    takeLive(live)
    showPromises(live.promises, live.window_s)
    pulse("on", Object.keys(live.drills).length ? "live, with a part switched off" : "live")
  } catch (error) {
    pulse("off", error.status === 401 ? "needs a key" : error.status === 403 ? "this key may not look" : "out of touch")
  }
  if (turn % BUNDLE_EVERY === BUNDLE_EVERY - 1) loadBundle()
}

async function keepLooking() {
  for (let turn = 0; ; turn += 1) {
    if (!document.hidden) await lookOnce(turn)
    await new Promise((resume) => setTimeout(resume, LIVE_EVERY_MS))
  }
}

async function begin() {
  loadBundle()
  const users = await loadPeople(session)
  load.learn([], users.map((user) => user.user_id))
  const known = session.recalled() ?? users[Math.floor(users.length / 2)]?.user_id
  await (known ? session.choose(known) : session.invent())
}

function startKey() {
  const [dialog, form, input] = [byId("key-dialog"), byId("key-form"), byId("key")]
  let isPutOff = false
  const open = () => dialog.open || dialog.showModal()
  keyNeeded.addEventListener("needed", () => {
    byId("key-button").hidden = false
    if (hasKey()) dropKey()
    if (!isPutOff) open()
  })
  byId("key-button").addEventListener("click", open)
  byId("key-cancel").addEventListener("click", () => dialog.close())
  dialog.addEventListener("close", () => (isPutOff = !hasKey()))
  form.addEventListener("submit", () => {
    keepKey(input.value.trim())
    input.value = ""
    isPutOff = false
    begin()
  })
}

function tellTiers() {
  byId("tiers").replaceChildren(...TIERS.map((tier) => make("div", {}, make("dt", {}, make("span", { class: "badge", data: { tier } }, tierTitle(tier))), make("dd", {}, tierMeaning(tier)))))
}

startTheme()
startPeople(session)
startAnswer(session)
startTimeline(session)
startSteer(session)
startKey()
tellTiers()
startKeys([
  { keys: [..."1234567890"], shown: ["1", "…", "0"], does: "Click the first to tenth item", run: (key) => clickPlace(session, (Number(key) + 9) % 10) },
  { keys: ["n"], shown: ["n"], does: "Invent a visitor", run: () => session.invent() },
  { keys: ["r"], shown: ["r"], does: "Ask again", run: () => session.ask() },
  { keys: ["l"], shown: ["l"], does: "Language model off or on", run: () => flip("llm", session) },
  { keys: ["f"], shown: ["f"], does: "Feature store off or on", run: () => flip("features", session) },
  { keys: ["+", "="], shown: ["+"], does: "More load", run: () => turnLoad(1, session) },
  { keys: ["-", "−"], shown: ["−"], does: "Less load", run: () => turnLoad(-1, session) },
  { keys: ["t"], shown: ["t"], does: "Light, dark, or as the system", run: nextTheme },
  { keys: ["?"], shown: ["?"], does: "This list", run: openHelp },
])
begin()
keepLooking()
