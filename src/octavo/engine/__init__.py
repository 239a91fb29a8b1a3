"""The engine: schedule -> run -> sample -> commit -> emit. Import the modules you need."""
