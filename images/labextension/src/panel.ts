import { LabIcon } from '@jupyterlab/ui-components';
import { Widget } from '@lumino/widgets';

import type { Action, IDevice, INow, IUsage } from './answer';
import { curve } from './curve';
import type { Session } from './session';
import {
  STOPPING,
  because,
  both,
  bytes,
  clock,
  credits,
  gigabytes,
  isGroup,
  isKnown,
  make,
  models,
  percent,
  span,
  warning
} from './words';

export const icon = new LabIcon({
  name: 'gpuspawner:gpu',
  svgstr: `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 24 24" width="16">
    <g class="jp-icon3" fill="#616161"><path d="M5 6h14a1 1 0 0 1 1 1v10a1 1 0 0 1-1 1H5a1 1 0 0
    1-1-1V7a1 1 0 0 1 1-1zm1 2v8h12V8zm3 1.500h6v5H9zM1 8h2v1.500H1zm0 3.250h2v1.500H1zM1
    14.500h2V16H1zM21 8h2v1.500h-2zm0 3.250h2v1.500h-2zm0 3.250h2V16h-2z"/></g></svg>`
});

/**
 * The panel at the side: each GPU with its last hour, what is left, and the buttons.
 */
export class Panel extends Widget {
  constructor(
    private session: Session,
    act: (action: Action) => void
  ) {
    super();
    this.id = 'gpuspawner-panel';
    this.addClass('gpuspawner-panel');
    this.title.icon = icon;
    this.title.caption = 'GPU and session';
    for (const action of ['snooze', 'extend', 'end'] as const) {
      const button = make('button', 'jp-Button jp-mod-styled', LABELS[action]) as HTMLButtonElement;
      button.type = 'button';
      button.classList.add(action === 'end' ? 'jp-mod-warn' : 'jp-mod-accept');
      button.addEventListener('click', () => act(action));
      this.buttons.append(button);
      this.button[action] = button;
    }
    // Above the rest: JupyterLab's notifications lie over the lower part.
    this.node.append(this.heading, this.buttons, this.content);
    session.changed.connect(() => this.update());
    this.update();
  }

  protected onUpdateRequest(): void {
    const { now, stopping } = this.session;
    this.buttons.hidden = !now || stopping;
    this.heading.textContent = now ? models(now.devices) : 'GPU';
    if (!now || stopping) {
      const text = stopping ? STOPPING : 'Status unavailable; retrying.';
      this.content.replaceChildren(make('p', '', text));
      return;
    }
    const at = this.session.clock();
    this.button.snooze.hidden = !now.warnings.some(it => it.snooze_minutes > 0);
    this.button.extend.hidden = now.lease.ends_at === null;
    const page = make('a', '', 'Sessions, billing and notifications') as HTMLAnchorElement;
    page.href = now.page;
    page.target = '_blank';
    page.rel = 'noopener';
    this.content.replaceChildren(
      ...now.warnings.map(it => make('p', 'gpuspawner-warning', warning(it, now, at))),
      ...now.devices.flatMap(device => this.device(device, now.devices.length > 1, at)),
      ...machine(now.lease.usage ?? null),
      facts(now, at),
      page
    );
  }

  private device(device: IDevice, named: boolean, at: number): HTMLElement[] {
    const parts: HTMLElement[] = [];
    if (named) {
      parts.push(make('h3', '', `GPU ${device.index}`));
    }
    if (device.sharing) {
      parts.push(make('p', '', device.sharing));
    }
    if (device.error) {
      parts.push(make('p', 'gpuspawner-warning', 'This GPU is not responding.'));
    }
    const used = device.used_bytes;
    const total = device.memory_bytes;
    const use = device.use_percent === null ? busy(device.busy) : percent(device.use_percent);
    const memory = isKnown(used) ? `${gigabytes(used)} of ${gigabytes(total)} GB` : 'unknown';
    parts.push(
      meter('Utilization', 'use', use, device.use_percent),
      meter('Memory', 'memory', memory, isKnown(used) ? (100 * used) / total : null)
    );
    const drawing = curve(device, at);
    const figure = make('figure', '');
    if (drawing) {
      figure.append(drawing);
    } else {
      figure.append(make('figcaption', '', 'The chart starts after the first full minute.'));
    }
    return [...parts, figure];
  }

  private heading = make('h2', '');
  private content = make('div', 'gpuspawner-content');
  private buttons = make('div', 'gpuspawner-buttons');
  private button = {} as Record<Action, HTMLButtonElement>;
}

const LABELS: Record<Action, string> = {
  snooze: 'Snooze',
  extend: 'Extend',
  end: 'Stop server'
};

function busy(known: boolean | null): string {
  return known === null ? 'unknown' : known ? 'in use' : 'idle';
}

function meter(name: string, kind: string, text: string, value: number | null): HTMLElement {
  const found = make('div', 'gpuspawner-meter');
  const row = make('div', 'gpuspawner-row');
  row.append(make('span', `gpuspawner-key gpuspawner-${kind}`, name), make('span', '', text));
  found.append(row);
  if (value !== null) {
    const bar = make('div', `gpuspawner-bar gpuspawner-${kind}`);
    const filled = make('div', '');
    filled.style.width = `${Math.min(100, Math.max(0, value))}%`;
    bar.append(filled);
    found.append(bar);
  }
  return found;
}

/** What the server uses of its machine. */
function machine(usage: IUsage | null): HTMLElement[] {
  if (!usage) {
    return [];
  }
  const { memory_bytes: used, memory_limit_bytes: limit } = usage;
  const isLimited = isKnown(used) && isKnown(limit) && limit > 0;
  const memory = isLimited ? `${bytes(used)} of ${bytes(limit)}` : isKnown(used) ? bytes(used) : 'unknown';
  return [
    make('h3', '', 'Server'),
    meter('Memory', 'memory', memory, isLimited ? (100 * used) / limit : null),
    listOf([
      ['CPU time', isKnown(usage.cpu_seconds) ? span(1000 * usage.cpu_seconds) : ''],
      ['Disk', both(usage.disk_read_bytes, 'read', usage.disk_written_bytes, 'written')],
      ['Network', both(usage.network_received_bytes, 'received', usage.network_sent_bytes, 'sent')]
    ])
  ];
}

function facts(now: INow, at: number): HTMLElement {
  const ends = now.lease.end?.at;
  return listOf([
    ['Environment', now.lease.environment],
    ['Ends', ends ? `${clock(ends, at)} (${span(Date.parse(ends) - at)} left), ${because(now)}` : ''],
    ['Cost so far', `${credits(now.lease.cost)} credits`],
    ['Price', `${credits(now.lease.rate_per_hour)} credits an hour`],
    [
      isGroup(now) ? 'Balance of the group' : 'Balance',
      now.account ? `${credits(now.account.balance)} credits` : ''
    ]
  ]);
}

/** What has a value, with its name before it. */
function listOf(rows: [string, string][]): HTMLElement {
  const list = make('dl', '');
  for (const [name, value] of rows) {
    if (value) {
      list.append(make('dt', '', name), make('dd', '', value));
    }
  }
  return list;
}
