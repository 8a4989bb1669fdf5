/**
 * The use of this server's GPUs, the remaining credits and time, warnings, and notebooks that
 * finish without a session.
 */
import { ILabShell, type JupyterFrontEnd, type JupyterFrontEndPlugin } from '@jupyterlab/application';
import { ICommandPalette } from '@jupyterlab/apputils';
import { PageConfig } from '@jupyterlab/coreutils';
import { IMainMenu } from '@jupyterlab/mainmenu';
import { INotebookTracker } from '@jupyterlab/notebook';
import { IStatusBar } from '@jupyterlab/statusbar';

import { addFinish } from './finish';
import { Item } from './item';
import { Panel } from './panel';
import { Session } from './session';
import { Warnings } from './warnings';

// Pixels: a narrower window is a phone's or the like.
const NARROW = 760;

const plugin: JupyterFrontEndPlugin<void> = {
  id: 'gpuspawner:session',
  description: 'GPU utilization, credits and time left of this server; "Finish without me".',
  autoStart: true,
  optional: [IStatusBar, ILabShell, INotebookTracker, ICommandPalette, IMainMenu],
  activate: (
    app: JupyterFrontEnd,
    statusBar: IStatusBar | null,
    labShell: ILabShell | null,
    tracker: INotebookTracker | null,
    palette: ICommandPalette | null,
    menu: IMainMenu | null
  ) => {
    if (PageConfig.getOption('gpuspawner') !== 'on') {
      return; // no hub, or no lease: there is nobody to ask
    }
    const session = new Session(app.serviceManager.serverSettings);
    const warnings = new Warnings(session);
    let panel: Panel | null = null;
    const open = () => {
      if (!panel) {
        panel = new Panel(session, action => void warnings.act(action));
        app.shell.add(panel, 'right', { rank: 900 });
      }
      if (window.innerWidth < NARROW) {
        labShell?.collapseLeft(); // there is room for one side only
      }
      app.shell.activateById(panel.id);
    };
    statusBar?.registerStatusItem('gpuspawner:session', {
      item: new Item(session, open),
      align: 'left',
      rank: 0,
      isActive: () => session.now !== null,
      activeStateChanged: session.changed
    });
    if (tracker && PageConfig.getOption('gpuspawnerRuns') === 'on') {
      addFinish(app, session, { tracker, palette, menu });
    }
    void app.restored.then(() => session.ask());
  }
};

export default plugin;
