// Values to words. Pure.

import type { IDevice, INow, IWarning } from './answer';

export const STOPPING = 'Stopping…';

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

/** `A100-80GB`, `2 × T4`, `No GPU`. */
export function models(devices: IDevice[]): string {
  const counts = new Map<string, number>();
  for (const device of devices) {
    const name = device.model.replace(/^NVIDIA /, '');
    counts.set(name, (counts.get(name) ?? 0) + 1);
  }
  const words = [...counts].map(([name, count]) => (count > 1 ? `${count} × ${name}` : name));
  return words.join(', ') || 'No GPU';
}

/** `GPU 35 %`, the use of all devices together; of MIG instances it is only known whether they work. */
export function use(devices: IDevice[]): string {
  const known = devices.map(device => device.use_percent).filter(isKnown);
  if (known.length) {
    return `GPU ${percent(known.reduce((sum, one) => sum + one, 0) / known.length)}`;
  }
  const busy = devices.map(device => device.busy).filter(isKnown);
  if (!busy.length) {
    return '';
  }
  return busy.some(Boolean) ? 'GPU in use' : 'GPU not used';
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
    const group = now.account?.account.startsWith('group:');
    return `because ${group ? 'the credits of the group' : 'your credits'} run out`;
  }
  return reason === 'membership' ? 'because your membership ends' : 'at its time limit';
}

/** What a warning says. */
export function warning(it: IWarning, now: INow, at: number): string {
  const stops = it.at ? ` It stops at ${clock(it.at, at)}` : '';
  const many = now.devices.length > 1;
  if (it.kind === 'lost') {
    const its = many ? 'its GPUs' : 'its GPU';
    return `This server does not reach ${its} any more. Save your work, and restart it with the same.`;
  }
  if (it.kind === 'sick') {
    const which = many ? 'A GPU of this server is' : 'The GPU of this server is';
    return `${which} sick: what runs on it may be wrong. Save your work, stop the server and start it again: it gets another GPU.`;
  }
  if (it.kind === 'idle') {
    const rests = many ? 'The GPUs of this server are not used.' : 'The GPU of this server is not used.';
    return it.at
      ? `${rests}${stops} unless there is work for ${many ? 'them' : 'it'}. Your files stay.`
      : `${rests} It costs credits all the same.`;
  }
  if (it.kind === 'session') {
    return `The time of this server is nearly over.${stops}. Your files stay.`;
  }
  const left = it.at ? ` They last until ${clock(it.at, at)}` : '';
  return it.key === 'credits:dry'
    ? `Your credits are used up.${stops}. Your files stay.`
    : `Your credits run low.${left}.`;
}

export function isKnown<T>(value: T | null): value is T {
  return value !== null;
}
