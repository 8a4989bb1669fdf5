import { Widget } from '@lumino/widgets';

import type { Session } from './session';
import { STOPPING, credits, memory, models, span, use } from './words';

/**
 * The item in the status bar, while there is an answer.
 */
export class Item extends Widget {
  constructor(
    private session: Session,
    open: () => void
  ) {
    super();
    this.addClass('gpuspawner-item');
    this.button.type = 'button';
    this.button.addEventListener('click', open);
    this.node.append(this.button);
    session.changed.connect(this.tell, this);
  }

  private tell(): void {
    const now = this.session.now;
    if (!now) {
      return;
    }
    const ends = now.lease.end?.at;
    const words: [string, string][] = this.session.stopping
      ? [['model', STOPPING]]
      : [
          ['model', models(now.devices)],
          ['use', use(now.devices)],
          ['memory', memory(now.devices)],
          ['credits', now.account ? `${credits(now.account.balance)} credits left` : ''],
          ['time', ends ? `${span(Date.parse(ends) - this.session.clock())} left` : '']
        ];
    const parts = words.filter(([, text]) => text);
    this.button.replaceChildren(
      ...parts.map(([name, text]) => {
        const part = document.createElement('span');
        part.className = `gpuspawner-part-${name}`;
        part.textContent = text;
        return part;
      })
    );
    const all = parts.map(([, text]) => text).join(', ');
    this.button.title = `${all}. Click for details.`;
    this.button.setAttribute('aria-label', `GPU: ${all}`);
    this.button.classList.toggle('gpuspawner-warned', now.warnings.length > 0);
  }

  private button = document.createElement('button');
}
