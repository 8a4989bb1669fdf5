import { PageConfig, URLExt } from '@jupyterlab/coreutils';
import { ServerConnection } from '@jupyterlab/services';
import { Signal } from '@lumino/signaling';

import type { Action, Answer, INow } from './answer';
import { NOT_RESPONDING } from './words';

// Seconds between two requests, of a visible page and of a hidden one.
const SEEN = 10;
const UNSEEN = 60;
// After a request that this server did not answer; twice as long each time.
const FIRST_PAUSE = 30;
const LAST_PAUSE = 600;

/**
 * What gpuspawner says about this server, fetched regularly.
 */
export class Session {
  /** The newest answer; null while there is none. */
  now: INow | null = null;

  /** The member stops this server, which then answers nothing more. */
  stopping = false;

  /** Emitted when there is a new answer, or none any more. */
  readonly changed = new Signal<this, void>(this);

  constructor(private settings: ServerConnection.ISettings) {
    this.url = URLExt.join(settings.baseUrl, 'gpuspawner', 'session');
    document.addEventListener('visibilitychange', () => this.looked());
  }

  /** Milliseconds since the epoch by the service's clock: a browser's may be wrong. */
  clock(): number {
    return Date.now() + this.ahead;
  }

  /** Ask now, and from then on. */
  async ask(): Promise<void> {
    window.clearTimeout(this.timer);
    if (this.stopping) {
      return;
    }
    let pause: number;
    try {
      pause = await this.askOnce();
      this.failed = 0;
    } catch {
      // JupyterLab itself tells the member that its server is gone.
      this.now = this.stopping ? this.now : null;
      pause = Math.min(LAST_PAUSE, FIRST_PAUSE * 2 ** this.failed);
      this.failed += 1;
    }
    this.askedAt = Date.now();
    if (this.stopping) {
      return; // a server's answer while it stops is not interesting
    }
    this.changed.emit();
    window.clearTimeout(this.timer);
    this.timer = window.setTimeout(() => void this.ask(), 1000 * pause);
  }

  /** Do it. Return the sentence that says why it was not done, or nothing. */
  async act(action: Action): Promise<string> {
    this.setStopping(action === 'end');
    let told: { done: boolean; message: string };
    try {
      const url = `${this.url}/${action}`;
      const response = await ServerConnection.makeRequest(url, { method: 'POST' }, this.settings);
      if (!response.ok) {
        throw new ServerConnection.ResponseError(response);
      }
      told = await response.json();
    } catch {
      // A server that stops does not answer to the end; the proxy or the Hub does in its place.
      told = { done: action === 'end', message: NOT_RESPONDING };
    }
    if (!told.done) {
      this.setStopping(false);
    }
    await this.ask();
    return told.done ? '' : told.message;
  }

  private setStopping(stopping: boolean): void {
    this.stopping = stopping;
    this.changed.emit();
  }

  private async askOnce(): Promise<number> {
    const response = await ServerConnection.makeRequest(this.url, {}, this.settings);
    if (!response.ok) {
      throw new ServerConnection.ResponseError(response);
    }
    const answer = (await response.json()) as Answer;
    if (!answer.available) {
      this.now = null;
      return Math.max(SEEN, answer.retry_seconds ?? LAST_PAUSE); // the server waits longer each time
    }
    this.now = answer;
    this.ahead = Date.parse(answer.as_of) - Date.now();
    return document.hidden ? UNSEEN : SEEN;
  }

  private looked(): void {
    if (!document.hidden && this.now && Date.now() - this.askedAt > 1000 * SEEN) {
      void this.ask();
    }
  }

  private url: string;
  private timer = 0;
  private failed = 0;
  private askedAt = 0;
  private ahead = 0;
}

/** The address of the Hub's page from which a server is started. */
export function home(): string {
  const path = URLExt.join(PageConfig.getOption('hubPrefix') || '/hub/', 'home');
  return PageConfig.getOption('hubHost') + path;
}
