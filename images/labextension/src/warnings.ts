import { Dialog, Notification, showDialog } from '@jupyterlab/apputils';

import type { Action, INow, IWarning } from './answer';
import { type Session, home } from './session';
import { clock, warning } from './words';

// A warning that was snoozed comes again this long before the end.
const SOON = 10 * 60000;

/**
 * Shows each warning once as a notification, and dismisses it when its reason is gone.
 */
export class Warnings {
  constructor(private session: Session) {
    session.changed.connect(this.show, this);
  }

  /** Do what a button says, and show the result. */
  async act(action: Action): Promise<void> {
    if (action === 'end' && !(await confirmed())) {
      return;
    }
    const refusal = await this.session.act(action);
    if (refusal) {
      Notification.error(refusal, { autoClose: false });
      return;
    }
    if (action === 'end') {
      window.location.href = home();
      return;
    }
    const now = this.session.now;
    const moment = now && (action === 'snooze' ? idle(now)?.at : now.lease.end?.at);
    const until = moment ? ` until ${clock(moment, this.session.clock())}` : '';
    const done = action === 'snooze' ? 'Postponed: this server runs' : 'Extended: this server runs';
    Notification.success(`${done}${until}.`, { autoClose: 8000 });
  }

  private show(): void {
    const now = this.session.now;
    if (!now) {
      return;
    }
    const due = new Map(now.warnings.map(it => [this.key(it), it]));
    for (const [key, id] of this.shown) {
      if (!due.has(key)) {
        Notification.dismiss(id);
        this.shown.delete(key);
      }
    }
    for (const [key, it] of due) {
      if (!this.known.has(key) && !this.isPutOff(it)) {
        this.known.add(key);
        this.shown.set(key, this.emit(it, now));
      }
    }
  }

  private emit(it: IWarning, now: INow): string {
    const actions: Notification.IAction[] = [];
    const add = (label: string, action: Action, displayType: Notification.ActionDisplayType) =>
      actions.push({ label, displayType, callback: () => void this.act(action) });
    if (it.snooze_minutes) {
      add('Snooze', 'snooze', 'accent');
    }
    if (it.kind === 'session') {
      add('Extend', 'extend', 'accent');
    }
    if (it.kind === 'lost') {
      // The service's own page has the button, which proves that a click is on it.
      const callback = () => void window.open(now.page, '_blank', 'noopener');
      actions.push({ label: 'Restart', displayType: 'accent', callback });
    }
    add('Stop', 'end', 'warn');
    const options = { autoClose: false as const, actions };
    return Notification.warning(warning(it, now, this.session.clock()), options);
  }

  private key(it: IWarning): string {
    return this.isSoon(it) ? `${it.key}:soon` : it.key;
  }

  /** A member who snoozed has read the warning, and sees it again only when the end is near. */
  private isPutOff(it: IWarning): boolean {
    const seen = [...this.known].some(key => key.startsWith('idle'));
    return it.kind === 'idle' && seen && it.at !== null && !this.isSoon(it);
  }

  private isSoon(it: IWarning): boolean {
    return it.kind === 'idle' && it.at !== null && Date.parse(it.at) - this.session.clock() < SOON;
  }

  private known = new Set<string>();
  private shown = new Map<string, string>();
}

function idle(now: INow): IWarning | undefined {
  return now.warnings.find(it => it.kind === 'idle');
}

async function confirmed(): Promise<boolean> {
  const result = await showDialog({
    title: 'Stop this server?',
    body: 'Running code ends now. Your files are kept, and nothing more is charged.',
    buttons: [Dialog.cancelButton(), Dialog.warnButton({ label: 'Stop' })]
  });
  return result.button.accept;
}
