"""What `auto_register: instrument_mf.InstrumentMonitor` finds. MindFormers copies this file to a cache of its own."""
from instrument.mindformers import InstrumentMonitor, MFInstrumentedStep  # noqa: F401
