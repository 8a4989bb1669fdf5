// Values to words. Pure.

import type { IDevice, INow, IQuote, IQuotedAccount, IWarning } from './answer';

export const STOPPING = 'Stopping…';
export const NOT_RESPONDING = 'This server is not responding. Try again in a moment.';

const GB = 2 ** 30;

/** `3 h 20 min`, rounded down to the minute. */
export function span(milliseconds: number): string {
  const minutes = Math.max(0, Math.floor(milliseconds / 60000));
  const [days, hours, rest] = [
    Math.floor(minutes / 1440),
    Math.floor(minutes / 60) % 24,
    minutes % 60
  ];
  if (days) {
    return `${days} d ${hours} h`;
  }
  if (hours) {
    return `${hours} h ${rest} min`;
  }
  return minutes ? `${minutes} min` : 'less than a minute';
}

/** The time of day here; with the day when it is not today. */
export function clock(moment: string, now: number): string {
  const at = new Date(moment);
  const today = at.toDateString() === new Date(now).toDateString();
  const time: Intl.DateTimeFormatOptions = { hour: '2-digit', minute: '2-digit' };
  const day: Intl.DateTimeFormatOptions = { weekday: 'short', day: 'numeric', month: 'short' };
  return at.toLocaleString(undefined, today ? time : { ...day, ...time });
}

/** A decimal string with two decimals, rounded half away from zero as on the service's pages. */
export function credits(amount: string): string {
  const [whole, decimals = ''] = amount.replace('-', '').split('.');
  const cents = Math.round(Number(whole + decimals.padEnd(6, '0').slice(0, 6)) / 10000);
  const sign = amount.startsWith('-') && cents ? '\u2212' : '';
  return `${sign}${Math.floor(cents / 100)}.${String(cents % 100).padStart(2, '0')}`;
}

export function percent(use: number): string {
  return `${Math.round(use)} %`;
}

export function gigabytes(bytes: number): string {
  const value = bytes / GB;
  return value < 10 && value > 0 ? value.toFixed(1) : String(Math.round(value));
}

/** `12.3 GB`, in units of 1024, as on the service's pages. */
export function bytes(count: number): string {
  const units = ['bytes', 'kB', 'MB', 'GB', 'TB', 'PB'];
  let [value, unit] = [count, 0];
  while (value >= 1023.95 && unit < units.length - 1) {
    [value, unit] = [value / 1024, unit + 1];
  }
  return `${unit ? value.toFixed(1) : value} ${units[unit]}`;
}

/** `1.2 GB read, 3.4 GB written`; nothing if neither is known. */
export function both(first: number | null, done: string, second: number | null, also: string): string {
  const parts: [number | null, string][] = [
    [first, done],
    [second, also]
  ];
  return parts.flatMap(([count, word]) => (count === null ? [] : `${bytes(count)} ${word}`)).join(', ');
}

/** `A100-80GB`, `2 × T4`, `1/4 of T4`, `No GPU`. */
export function models(devices: IDevice[]): string {
  const counts = new Map<string, number>();
  for (const device of devices) {
    const model = device.model.replace(/^NVIDIA /, '');
    const { held_slots: held, slots } = device;
    const name = held < slots ? `${held}/${slots} of ${model}` : model;
    counts.set(name, (counts.get(name) ?? 0) + 1);
  }
  const words = [...counts].map(([name, count]) => (count > 1 ? `${count} × ${name}` : name));
  return words.join(', ') || 'No GPU';
}

/** `GPU 35 %`, the utilization of all devices together; MIG instances only tell whether they are used. */
export function use(devices: IDevice[]): string {
  const known = devices.map(device => device.use_percent).filter(isKnown);
  if (known.length) {
    return `GPU ${percent(known.reduce((sum, one) => sum + one, 0) / known.length)}`;
  }
  const busy = devices.map(device => device.busy).filter(isKnown);
  if (!busy.length) {
    return '';
  }
  return busy.some(Boolean) ? 'GPU in use' : 'GPU idle';
}

/** `memory 12 of 80 GB`, of all devices together. */
export function memory(devices: IDevice[]): string {
  const used = devices.map(device => device.used_bytes);
  if (!devices.length || !used.every(isKnown)) {
    return '';
  }
  const total = devices.reduce((sum, device) => sum + device.memory_bytes, 0);
  const sum = used.reduce((one, other) => one + other, 0);
  return `memory ${gigabytes(sum)} of ${gigabytes(total)} GB`;
}

/** Why this server stops by itself. */
export function because(now: INow): string {
  const reason = now.lease.end?.reason;
  if (reason === 'credits') {
    return `because ${isGroup(now) ? 'the credits of the group' : 'your credits'} run out`;
  }
  return reason === 'membership' ? 'because your membership ends' : 'at its time limit';
}

/** The text of a warning. */
export function warning(it: IWarning, now: INow, at: number): string {
  const many = now.devices.length > 1;
  const its = many ? 'its GPUs' : 'its GPU';
  const stops = it.at ? `This server stops at ${clock(it.at, at)}` : 'This server is stopped soon';
  if (it.kind === 'lost') {
    return `This server has lost access to ${its}. Save your work, then restart it: it keeps the same ${many ? 'GPUs' : 'GPU'}.`;
  }
  if (it.kind === 'sick') {
    const which = many ? 'A GPU of this server is' : 'The GPU of this server is';
    return `${which} sick: programs on it may fail or give wrong results. Save your work, stop the server and start it again: it gets another GPU.`;
  }
  if (it.kind === 'idle') {
    const idle = `${its} ${many ? 'are' : 'is'} idle`;
    return it.at
      ? `${stops}: ${idle}. It keeps running if the ${many ? 'GPUs are' : 'GPU is'} used before then. Your files are kept.`
      : `This server does not use ${its}. It still costs credits: stop it if you do not need it.`;
  }
  if (it.kind === 'session') {
    return `${stops}, at its time limit: save your work. Your files are kept.`;
  }
  const credits = whose(now);
  if (it.key === 'credits:dry') {
    return `${credits} have run out. ${stops}: save your work. Your files are kept.`;
  }
  return it.at ? `${credits} last until ${clock(it.at, at)}.` : `${credits} are running low.`;
}

function whose(now: INow): string {
  return isGroup(now) ? 'The credits of the group' : 'Your credits';
}

/** Whether a group pays for this server. */
export function isGroup(now: INow): boolean {
  return Boolean(now.account?.account.startsWith('group:'));
}

/** What a run costs: `2 x T4: 8.00 credits an hour, 16.00 credits for 2 h 0 min.` */
export function price(quote: IQuote): string {
  const what = quote.what ? `${quote.what}: ` : '';
  const total =
    quote.total && quote.hours !== null ? `, ${quote.total} for ${span(3600000 * quote.hours)}` : '';
  const lasts = quote.lasts ? ` The credits last ${quote.lasts}.` : '';
  return `${what}${quote.price}${total}.${lasts}`;
}

/** `preemptible, for 50 % of the price` */
export function preemptibleLabel(share: number): string {
  if (share === 0) {
    return 'preemptible, free of charge';
  }
  return share < 1 ? `preemptible, for ${Number((100 * share).toFixed(1))} % of the price` : 'preemptible';
}

/** When a run would start, as the start form says it. */
export function start(quote: IQuote, now: number): string {
  if (quote.at_once) {
    return 'Starts now.';
  }
  if (quote.preemptible) {
    return 'Starts when GPUs are idle. It has no place in the queue.';
  }
  const place = quote.place ? `It would be number ${quote.place} in the queue.` : 'It would wait in the queue.';
  const { estimate, planned, latest } = quote;
  const parts: string[] = [];
  if (estimate) {
    const [low, high] = [clock(estimate.low, now), clock(estimate.high, now)];
    parts.push(`about ${low === high ? low : `${low} to ${high}`} (8 of 10 starts)`);
  } else if (planned && (!latest || planned < latest)) {
    parts.push(`around ${clock(planned, now)} (a first guess)`);
  }
  if (latest) {
    parts.push(`by ${clock(latest, now)} at the latest`);
  }
  return parts.length ? `${place} Expected start: ${parts.join(', ')}.` : place;
}

/** `vision, 30.00 credits`. */
export function accountLabel(each: IQuotedAccount): string {
  const [kind, name] = each.account.split(/:(.*)/);
  return `${kind === 'member' ? 'your account' : name}, ${credits(each.available)} credits`;
}

export function isKnown<T>(value: T | null): value is T {
  return value !== null;
}

export function make(tag: string, name: string, text = ''): HTMLElement {
  const found = document.createElement(tag);
  if (name) {
    found.className = name;
  }
  found.textContent = text;
  return found;
}
