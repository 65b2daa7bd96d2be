// The keyboard: what each key does, and the list that says so.

import { byId, make } from "./dom.js"

export function startKeys(shortcuts) {
  const byKey = new Map(shortcuts.flatMap(({ keys, run }) => keys.map((key) => [key, run])))
  const names = shortcuts.map(({ shown, does }) => [make("dt", {}, ...shown.map((key) => make("kbd", {}, key))), make("dd", {}, does)])
  byId("shortcuts").replaceChildren(...names.flat())
  byId("help-button").addEventListener("click", openHelp)
  document.addEventListener("keydown", (event) => {
    const isTyping = event.target.closest?.("input:not([type=range]), textarea, select, dialog")
    const run = byKey.get(event.key)
    if (!run || isTyping || event.ctrlKey || event.metaKey || event.altKey) return
    event.preventDefault()
    run(event.key)
  })
}

export function openHelp() {
  if (!byId("help").open) byId("help").showModal()
}
