// Raising the load: requests at a chosen rate, sent when they are due and not when the one before came back (open loop).

import { recommend } from "./api.js"
import { takenMs } from "./session.js"

export const RATES = [0, 5, 10, 25, 50, 100, 200, 400]
const TICK_MS = 20
const MOST_IN_FLIGHT = 128

export class Load extends EventTarget {
  rate = 0
  sent = 0
  answered = 0
  late = 0
  refused = 0
  unsent = 0
  #inFlight = 0
  #timer = 0
  #due = 0
  #ticked = 0
  #items = []
  #users = []

  // What the made-up visitors have looked at, and which known users are mixed in.
  learn(itemIds, userIds = []) {
    this.#items = [...new Set([...this.#items, ...itemIds])].slice(-200)
    if (userIds.length) this.#users = userIds
  }

  set(rate, deadlineMs) {
    this.deadlineMs = deadlineMs()
    this.rate = rate
    this.#deadline = deadlineMs
    clearInterval(this.#timer)
    if (rate === 0) return
    this.sent = this.answered = this.late = this.refused = this.unsent = 0
    this.#ticked = performance.now()
    this.#timer = setInterval(() => this.#tick(), TICK_MS)
  }

  #deadline = () => 200

  #tick() {
    const now = performance.now()
    this.#due += (this.rate * (now - this.#ticked)) / 1000
    this.#ticked = now
    for (; this.#due >= 1; this.#due -= 1) {
      if (this.#inFlight >= MOST_IN_FLIGHT || this.#items.length === 0) this.unsent += 1
      else this.#send()
    }
  }

  async #send() {
    this.#inFlight += 1
    this.sent += 1
    const deadlineMs = this.#deadline()
    try {
      const answer = await recommend({ ...this.#visitor(), k: 10, deadline_ms: deadlineMs }, { priority: "low" })
      const ms = takenMs(answer)
      this.answered += 1
      if (ms > deadlineMs) this.late += 1
      this.dispatchEvent(new CustomEvent("answer", { detail: { tier: answer.tier, ms } }))
    } catch {
      this.refused += 1
    } finally {
      this.#inFlight -= 1
    }
  }

  // Most come with a history of their own, some with hardly any, and some are known.
  #visitor() {
    const chance = Math.random()
    if (chance < 0.2 && this.#users.length) return { user_id: pick(this.#users) }
    const length = chance < 0.4 ? 1 + Math.floor(2 * Math.random()) : 4 + Math.floor(9 * Math.random())
    return { recent_item_ids: Array.from({ length }, () => pick(this.#items)) }
  }
}

const pick = (list) => list[Math.floor(Math.random() * list.length)]
