// Items: find them by id or title, hide and show them, and boost an item on the edited surface.

import { find, patch, segment } from "./api.js"
import { announce, byId, failureText, make, setText } from "./dom.js"
import { plural } from "./text.js"

export function startItems(session, surfaces) {
  byId("find-form").addEventListener("submit", (event) => {
    event.preventDefault()
    search(session, surfaces)
  })
}

async function search(session, surfaces) {
  const text = byId("find").value.trim()
  if (!text) return
  try {
    const { items } = await find(text)
    byId("found").replaceChildren(...items.map((item) => row(item, session, surfaces)))
    setText(byId("find-note"), items.length ? `${plural(items.length, "item")} found.` : `No item has this id or these words in its title.`)
  } catch (error) {
    setText(byId("find-note"), failureText(error, "Nothing was found"))
  }
}

function row(item, session, surfaces) {
  const state = make("small", { class: "state" })
  const toggle = make("button", { type: "button", onclick: () => change(!item.available) })
  const show = () => {
    setText(state, item.available ? (item.is_shown ? "shown" : "not shown now: its times") : "hidden")
    state.dataset.health = item.available ? "good" : "bad"
    setText(toggle, item.available ? "Hide" : "Show")
    toggle.setAttribute("aria-label", `${toggle.textContent} ${item.title}`)
  }
  const change = async (available) => {
    toggle.disabled = true
    try {
      await patch(`/console/items/${segment(item.item_id)}`, { available })
      Object.assign(item, { available, is_shown: available })
      const text = `${item.title} is ${available ? "shown again" : "hidden"}, in every answer within a second.`
      setText(byId("find-note"), text)
      announce(text)
      session.requestRepeatedly([0, 500, 1_200])
    } catch (error) {
      setText(byId("find-note"), failureText(error, "Nothing was changed"))
    }
    toggle.disabled = false
    toggle.focus({ preventScroll: true })
    show()
  }
  const boost = make("button", { type: "button", "aria-label": `Boost ${item.title} in the draft`, onclick: () => surfaces.boost(item, Number(byId("factor").value)) }, "Boost")
  show()
  const about = [`id ${item.item_id}`, ...item.categories.slice(0, 2)].join(" · ")
  return make("li", { data: { item: item.item_id } }, make("span", { class: "title" }, item.title, make("small", {}, about)), state, make("span", { class: "acts" }, toggle, boost))
}
