"""From the folder of a run to one HTML page that can be filed. No torch; nothing is played again."""
