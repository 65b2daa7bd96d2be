/**
 * A client for browsers and Node: one call is attempts until an answer, an error that a retry would not mend, or the deadline.
 * It retries as the Python client does (tailrace_client/retry.py). The types of requests and answers are generated: src/openapi.ts.
 */
import type { components, paths } from "./openapi.ts";

export type Schema<Name extends keyof components["schemas"]> = components["schemas"][Name];
export type Recommendation = Schema<"RecommendationBody">;
export type RecommendRequest = Omit<Schema<"RecommendBody">, "deadline_ms">;
export type Event = Schema<"EventBody">;
export type Recorded = Schema<"RecordedBody">;
export type Assigned = Schema<"AssignedBody">;
export type Explanation = Schema<"ExplanationBody">;

type Verb = "get" | "post" | "put" | "patch" | "delete";
/** The paths that have an operation of this verb. */
export type PathOf<V extends Verb> = { [P in keyof paths]: paths[P][V] extends object ? P : never }[keyof paths];
type Json<T> = T extends { content: { "application/json": infer Body } } ? Body : never;
type Body<O> = O extends { requestBody: infer Request } ? { body: Json<Request> } : { body?: never };
type Names<O> = O extends { parameters: { path: infer Path } } ? { path: Path } : { path?: never };
type Query<O> = O extends { parameters: { query?: infer Q } } ? { query?: Q } : { query?: never };
/** What an operation takes. */
export type Input<O> = Body<O> & Names<O> & Query<O>;
/** What an operation answers. */
export type Answer<O> = O extends { responses: infer All } ? Json<All[keyof All & (200 | 201 | 202)]> : never;

export interface CallOptions {
  /** For all attempts of the call together. 200 for recommendations, else 5,000. */
  deadlineMs?: number;
  /** Ends the call, which then throws the signal's reason. */
  signal?: AbortSignal;
}

export interface ClientOptions {
  apiKey?: string;
  /** Retries per call, in the long run, and how many a client may make beyond that share. */
  retryShare: number;
  retryReserve: number;
  /** Upper bound of the random pause before the first retry, which doubles with each, and where that ends. */
  firstPauseMs: number;
  longestPauseMs: number;
  /** Part of each deadline for the way there and back: the server is given what is left less this. */
  networkMs: number;
  fetch: typeof fetch;
}

/** A call failed: `code` is one of the server's, or "unreachable": no answer came. */
export class TailraceError extends Error {
  readonly code: string;
  readonly field: string | undefined;
  readonly fix: string | undefined;
  readonly retryAfterSeconds: number | undefined;
  readonly requestId: string | undefined;
  numAttempts = 1;

  constructor(code: string, message: string, more: { field?: string; fix?: string; retryAfterSeconds?: number; requestId?: string; cause?: unknown } = {}) {
    super(`${code}: ${more.field ? `${more.field}: ` : ""}${message}${more.fix ? `; ${more.fix}` : ""}`, { cause: more.cause });
    this.name = "TailraceError";
    this.code = code;
    this.field = more.field;
    this.fix = more.fix;
    this.retryAfterSeconds = more.retryAfterSeconds;
    this.requestId = more.requestId;
  }
}

const MAX_DEADLINE_MS = 60_000; // the server's
/** For answers that are not the server's own, such as a proxy's. */
const CODES: Record<number, string> = {
  401: "unauthenticated", 403: "not_allowed", 404: "not_found", 413: "request_too_large", 422: "invalid_request",
  429: "overloaded", 502: "unreachable", 503: "unavailable", 504: "deadline_exceeded",
};
const RETRIED = new Set(["unreachable", "unavailable"]);
const RETRIED_AFTER = new Set(["overloaded", "quota_exceeded"]); // only after the time that the server named

export class Client {
  readonly #address: string;
  readonly #options: ClientOptions;
  #tokens: number;

  /** @param address such as https://HOST, or a path of the page's own origin that leads to the door */
  constructor(address: string, options: Partial<ClientOptions> = {}) {
    this.#address = address.replace(/\/$/, "");
    const defaults = { retryShare: 0.1, retryReserve: 10, firstPauseMs: 20, longestPauseMs: 1_000, networkMs: 10 };
    this.#options = { ...defaults, fetch: globalThis.fetch.bind(globalThis), ...options };
    this.#tokens = this.#options.retryReserve;
  }

  /** Recommend items to a user, or to a visitor by `recent_item_ids`. */
  recommend(request: RecommendRequest, options: CallOptions = {}): Promise<Recommendation> {
    return this.call("post", "/v1/recommendations", { body: { request_id: newId(), ...request } }, { deadlineMs: 200, ...options });
  }

  /** Search items by words of their titles, or by a wish. */
  search(query: paths["/v1/search"]["get"]["parameters"]["query"], options: CallOptions = {}): Promise<Recommendation> {
    return this.call("get", "/v1/search", { query }, { deadlineMs: 200, ...options });
  }

  /** Record what users did: all or none. */
  record(events: Event | readonly Event[], options?: CallOptions): Promise<Recorded> {
    return this.call("post", "/v1/events", { body: { events: Array.isArray(events) ? [...(events as readonly Event[])] : [events as Event] } }, options);
  }

  /** Say which version and variants a user, or a visitor's session, gets on each surface. */
  assignment(unit: { user_id: string } | { session_id: string }, options?: CallOptions): Promise<Assigned> {
    return this.call("get", "/v1/assignment", { query: unit }, options);
  }

  /** Explain how a recent request was answered; the key needs the scope admin. */
  explain(requestId: string, options?: CallOptions): Promise<Explanation> {
    return this.call("get", "/v1/explanations/{request_id}", { path: { request_id: requestId } }, options);
  }

  /** Call any operation of the server by verb and path, with the types of its OpenAPI document. Each event without an id gets one, so that a retry has no effect. */
  async call<V extends Verb, P extends PathOf<V>>(verb: V, path: P, input: Input<paths[P][V]>, options: CallOptions = {}): Promise<Answer<paths[P][V]>> {
    const { body, path: names, query } = input as { body?: unknown; path?: Record<string, unknown>; query?: Record<string, unknown> };
    const filled = String(path).replace(/\{(\w+)\}/g, (_, name: string) => segment(name, String(names?.[name] ?? "")));
    const given = Object.entries(query ?? {}).filter(([, value]) => value !== undefined);
    const asked = given.length ? `?${new URLSearchParams(given.map(([name, value]) => [name, String(value)]))}` : "";
    const sent = path === "/v1/events" ? identified(body) : body;
    const request = { method: verb.toUpperCase(), ...(sent === undefined ? {} : { body: JSON.stringify(sent) }) };
    return (await this.#attempts(this.#address + filled + asked, request, options)) as Answer<paths[P][V]>;
  }

  async #attempts(url: string, request: RequestInit, { deadlineMs = 5_000, signal }: CallOptions): Promise<unknown> {
    if (!(deadlineMs > 0)) throw new TailraceError("invalid_request", `wrong value: ${deadlineMs}`, { field: "deadlineMs", fix: "send milliseconds above 0" });
    const ends = performance.now() + deadlineMs;
    const { retryShare, retryReserve, firstPauseMs, longestPauseMs } = this.#options;
    this.#tokens = Math.min(retryReserve, this.#tokens + retryShare);
    let before: TailraceError | undefined;
    for (let num = 1; ; num++) {
      try {
        return await this.#attempt(url, request, ends, before, signal);
      } catch (error) {
        if (!(error instanceof TailraceError)) throw error;
        error.numAttempts = num;
        error.cause = before ?? error.cause;
        const mayHelp = RETRIED.has(error.code) || (RETRIED_AFTER.has(error.code) && error.retryAfterSeconds !== undefined);
        const bound = Math.min(longestPauseMs, firstPauseMs * 2 ** Math.min(num - 1, 16));
        const pause = (error.retryAfterSeconds ?? 0) * 1_000 + Math.random() * bound;
        if (!mayHelp || performance.now() + pause >= ends || this.#tokens < 1) throw error;
        this.#tokens -= 1;
        before = error;
        await new Promise((done) => setTimeout(done, pause));
      }
    }
  }

  async #attempt(url: string, request: RequestInit, ends: number, before: TailraceError | undefined, signal?: AbortSignal): Promise<unknown> {
    signal?.throwIfAborted();
    const left = ends - performance.now();
    if (left <= 0) throw late(before);
    const timeout = AbortSignal.timeout(Math.ceil(left));
    const serverMs = Math.min(MAX_DEADLINE_MS, Math.max(1, Math.round(left - this.#options.networkMs)));
    const headers: Record<string, string> = { "x-deadline-ms": String(serverMs) };
    if (request.body) headers["content-type"] = "application/json";
    if (this.#options.apiKey) headers["authorization"] = `Bearer ${this.#options.apiKey}`;
    let answer: Response, text: string;
    try {
      answer = await this.#options.fetch(url, { ...request, headers, signal: signal ? AbortSignal.any([timeout, signal]) : timeout });
      text = await answer.text();
    } catch (error) {
      signal?.throwIfAborted();
      throw timeout.aborted ? late(before) : new TailraceError("unreachable", reason(error), { cause: error });
    }
    const body = parsed(text);
    if (answer.ok && (body !== undefined || text === "")) return body;
    throw refusal(answer, body);
  }
}

/** A parameter of a path. URLs have no way to write `.` and `..` there: each would be a step to another path. */
function segment(name: string, value: string): string {
  if (!["", ".", ".."].includes(value)) return encodeURIComponent(value);
  throw new TailraceError("invalid_request", `"${value}" fits in no path`, { field: name, fix: "call the gRPC door" });
}

/** The body of /v1/events, in any of its forms, with an id in every event. */
function identified(body: unknown): unknown {
  if (Array.isArray(body)) return body.map(identified);
  if (typeof body !== "object" || body === null) return body;
  return "events" in body ? { ...body, events: identified(body.events) } : { ...body, event_id: (body as Partial<Event>).event_id ?? newId() };
}

/** The error of a passed deadline; where the attempt before reached nobody, it is that. */
function late(before: TailraceError | undefined): TailraceError {
  if (before?.code === "unreachable") return new TailraceError(before.code, `${before.message}; no answer came before the deadline`, { cause: before });
  return new TailraceError("deadline_exceeded", `no answer came before the deadline${before ? `; the attempt before: ${before.message}` : ""}`, { cause: before });
}

function refusal(answer: Response, body: unknown): TailraceError {
  const error = (body as { error?: Partial<Schema<"ErrorDetail">> } | undefined)?.error ?? {};
  const after = answer.headers.get("retry-after") ?? "";
  return new TailraceError(error.code ?? CODES[answer.status] ?? "internal", error.message ?? `status ${answer.status}, not from Tailrace`, {
    ...(error.field ? { field: error.field } : {}), ...(error.fix ? { fix: error.fix } : {}),
    ...(error.request_id ? { requestId: error.request_id } : {}), ...(/^\d+$/.test(after) ? { retryAfterSeconds: Number(after) } : {}),
  });
}

/** What fetch hides in the cause of its error, such as ECONNREFUSED. */
function reason(error: unknown): string {
  const cause = (error as { cause?: { code?: string } }).cause;
  return cause?.code ? `${String(error)} (${cause.code})` : String(error);
}

function parsed(text: string): unknown {
  try {
    return JSON.parse(text) as unknown;
  } catch {
    return undefined;
  }
}

/** crypto.randomUUID is for pages over TLS only. */
function newId(): string {
  return Array.from(crypto.getRandomValues(new Uint8Array(16)), (byte) => byte.toString(16).padStart(2, "0")).join("");
}
