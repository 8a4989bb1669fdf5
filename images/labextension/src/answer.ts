// What this server answers at gpuspawner/session, as gpuspawner's service wrote it.

export interface IMinute {
  at: string;
  use_percent: number | null;
  used_bytes: number | null;
}

export interface IDevice {
  uuid: string;
  index: number;
  model: string;
  memory_bytes: number;
  slots: number;
  held_slots: number;
  // The session's share of a shared device; else empty.
  sharing: string;
  use_percent: number | null;
  busy: boolean | null;
  used_bytes: number | null;
  error: string;
  minutes: IMinute[];
}

export interface ILease {
  environment: string;
  rate_per_hour: string;
  cost: string;
  ends_at: string | null;
  // The earliest of all; null when it does not end by itself, or is being stopped.
  end: IEnd | null;
  // Null until it was measured; absent if the service is older.
  usage?: IUsage | null;
}

// What this server used of its machine; null for what is not reported.
export interface IUsage {
  cpu_seconds: number | null;
  memory_bytes: number | null;
  memory_limit_bytes: number | null;
  disk_read_bytes: number | null;
  disk_written_bytes: number | null;
  network_received_bytes: number | null;
  network_sent_bytes: number | null;
}

export interface IEnd {
  at: string;
  reason: 'time' | 'credits' | 'membership';
}

export interface IWarning {
  kind: 'lost' | 'sick' | 'idle' | 'session' | 'credits';
  // Stays while it is the same warning.
  key: string;
  at: string | null;
  snooze_minutes: number;
}

export interface INow {
  available: true;
  as_of: string;
  page: string;
  lease: ILease;
  account: { account: string; balance: string } | null;
  devices: IDevice[];
  warnings: IWarning[];
}

export interface IAway {
  available: false;
  retry_seconds?: number;
}

export type Answer = INow | IAway;

export type Action = 'snooze' | 'extend' | 'end';

// What a run asks for, in the fields of the start form, including what the session started with.
export type Options = Record<string, unknown>;

export interface IQuote {
  options: Options;
  environment_name: string;
  gpus: number;
  most_gpus: number;
  // What a share of a GPU is here; empty if none can be asked for.
  share: string;
  cpu_variant: boolean;
  models: string[];
  hours: number | null;
  most_hours: number | null;
  account: string;
  accounts: IQuotedAccount[];
  what: string;
  price: string;
  total: string;
  lasts: string;
  refusal: string;
  preemptible: boolean;
  // What a preemptible run costs, as a share of the price; null where there are none.
  preemptible_share: number | null;
  at_once: boolean;
  place: number | null;
  estimate: { low: string; likely: string; high: string } | null;
  planned: string | null;
  latest: string | null;
}

export interface IQuotedAccount {
  account: string;
  available: string;
}

export interface ISubmitted {
  id: string;
  folder: string;
  // The same as the file browser names it; empty if it cannot show it.
  open: string;
}
