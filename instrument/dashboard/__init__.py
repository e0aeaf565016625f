"""The live view: follows the files of runs, keeps their columns in memory, and shows them in a browser.

    tail.py       the bytes of a run's files, as they grow
    store.py      what they say, in memory: numbers (table.py, growing.py) and the rest (notes.py); points that are drawn
    drawn.py      of these, the curve of one metric; decimate.py: the mathematics of that
    charts.py     points to the options of ECharts, as plain dictionaries; maps.py: those of heat maps and bars
    catalog.py    which metrics go into which chart
    discovery.py  which directories are runs, and which may be read
    follow.py     the one thread that reads, for all runs
    view.py       what one browser looks at, and its text in the address
    session.py    what one browser gets next: curves.py, panels.py
    page.py       the page (NiceGUI); server.py, guard.py: port, token, origins
    report.py     the same as one file, without a server; terminal.py: a run in the terminal

Imports neither MindSpore nor, except for `page`, `server` and `sockets`, NiceGUI.
"""
