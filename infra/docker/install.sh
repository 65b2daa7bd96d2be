# Makes the sources in /app importable, `tailrace` a command, and their bytecode part of the image, which is read-only when it runs.
set -eu
site=/opt/tailrace/lib/python3.11/site-packages
echo /app > "$site/tailrace.pth"
printf '#!/opt/tailrace/bin/python\nfrom services.cli import main\n\nmain()\n' > /opt/tailrace/bin/tailrace
chmod 755 /opt/tailrace/bin/tailrace
python -m compileall -q --invalidation-mode unchecked-hash /app
