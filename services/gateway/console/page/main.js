// The console's entry point: starts the parts, binds the keyboard, and reads the live view once a second while the page is visible.

import { dropKey, get, hasKey, keyNeeded, storeKey } from "./api.js"
import { clickPlace, startAnswer } from "./answer.js"
import { loadBundle } from "./bundle.js"
import { changeLoad, flip, load, showLive, startControls } from "./controls.js"
import { byId, make, setText } from "./dom.js"
import { startErasure } from "./erasure.js"
import { startItems } from "./items.js"
import { loadModels } from "./models.js"
import { loadReleases, startReleases } from "./releases.js"
import { Session } from "./session.js"
import { showSlos } from "./slo.js"
import { loadSurfaces, startSurfaces } from "./surfaces.js"
import { TIERS, tierMeaning, tierTitle } from "./text.js"
import { nextTheme, startTheme } from "./theme.js"
import { loadUsers, startUsers } from "./users.js"

const LIVE_EVERY_MS = 1_000
const BUNDLE_EVERY = 15
const RELEASES_EVERY = 5
const session = new Session()

const SHORTCUTS = [
  { keys: [..."1234567890"], shown: ["1", "…", "0"], title: "Click the first to tenth item", run: (key) => clickPlace(session, (Number(key) + 9) % 10) },
  { keys: ["n"], shown: ["n"], title: "New user", run: () => session.chooseNew() },
  { keys: ["r"], shown: ["r"], title: "Request again", run: () => session.request() },
  { keys: ["/"], shown: ["/"], title: "Search, or say a wish", run: () => byId("wish").focus() },
  { keys: ["l"], shown: ["l"], title: "Language model off or on", run: () => flip("llm") },
  { keys: ["f"], shown: ["f"], title: "Feature store off or on", run: () => flip("features") },
  { keys: ["+", "="], shown: ["+"], title: "More load", run: () => changeLoad(1, session) },
  { keys: ["-", "−"], shown: ["−"], title: "Less load", run: () => changeLoad(-1, session) },
  { keys: ["t"], shown: ["t"], title: "Theme: light, dark or system", run: nextTheme },
  { keys: ["?"], shown: ["?"], title: "Show this list", run: openHelp },
]

function startShortcuts() {
  const byKey = new Map(SHORTCUTS.flatMap(({ keys, run }) => keys.map((key) => [key, run])))
  const entries = SHORTCUTS.map(({ shown, title }) => [make("dt", {}, ...shown.map((key) => make("kbd", {}, key))), make("dd", {}, title)])
  byId("shortcuts").replaceChildren(...entries.flat())
  byId("help-button").addEventListener("click", openHelp)
  document.addEventListener("keydown", (event) => {
    const isTyping = event.target.closest?.("input:not([type=range]), textarea, select, dialog")
    const run = byKey.get(event.key)
    if (!run || isTyping || event.ctrlKey || event.metaKey || event.altKey) return
    event.preventDefault()
    run(event.key)
  })
}

function openHelp() {
  if (!byId("help").open) byId("help").showModal()
}

function startKeyDialog() {
  const [dialog, form, input] = [byId("key-dialog"), byId("key-form"), byId("key")]
  let isDeclined = false
  const open = () => dialog.open || dialog.showModal()
  keyNeeded.addEventListener("needed", () => {
    byId("key-button").hidden = false
    if (hasKey()) dropKey()
    if (!isDeclined) open()
  })
  byId("key-button").addEventListener("click", open)
  byId("key-cancel").addEventListener("click", () => dialog.close())
  dialog.addEventListener("close", () => (isDeclined = !hasKey()))
  form.addEventListener("submit", () => {
    storeKey(input.value.trim())
    input.value = ""
    isDeclined = false
    begin()
  })
}

function showTiers() {
  const badge = (tier) => make("span", { class: "badge", data: { tier } }, tierTitle(tier))
  byId("tiers").replaceChildren(...TIERS.map((tier) => make("div", {}, make("dt", {}, badge(tier)), make("dd", {}, tierMeaning(tier)))))
}

function showPulse(state, text) {
  byId("pulse").dataset.state = state
  setText(byId("pulse-text"), text)
}

async function begin() {
  loadBundle()
  loadSurfaces()
  loadReleases()
  loadModels()
  const users = await loadUsers(session)
  load.addMaterial([], users.map((user) => user.user_id))
  const userId = session.lastUserId() ?? users[Math.floor(users.length / 2)]?.user_id
  await (userId ? session.choose(userId) : session.chooseNew())
}

async function readLive() {
  try {
    const live = await get("/console/live", { priority: "high" })
    showLive(live)
    showSlos(live.slos, live.window_s)
    showPulse("on", Object.keys(live.drills).length ? "live, drill running" : "live")
  } catch (error) {
    showPulse("off", error.status === 401 ? "API key needed" : error.status === 403 ? "key lacks the scope recommend" : "not connected")
  }
}

async function followLive() {
  for (let round = 1; ; round += 1) {
    if (!document.hidden) {
      await readLive()
      if (round % BUNDLE_EVERY === 0) loadBundle()
      if (round % RELEASES_EVERY === 0) loadReleases().then(loadModels)
    }
    await new Promise((resume) => setTimeout(resume, LIVE_EVERY_MS))
  }
}

startTheme()
startUsers(session)
startAnswer(session)
startControls(session)
startItems(session, startSurfaces(session))
startErasure(session)
startReleases()
startKeyDialog()
startShortcuts()
showTiers()
begin()
followLive()
