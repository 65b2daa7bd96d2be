# Make the user and the folders of the image. User 10001 owns what is writable at run time. `sh rooms.sh`, as root.
set -eu
groupadd --gid 10001 tailrace
useradd --uid 10001 --gid 10001 --home-dir /tmp --no-create-home --shell /usr/sbin/nologin tailrace
for folder in /state /state/run /kernels /secrets /secrets/redis /secrets/kafka /secrets/doors /secrets/keys /secrets/grafana; do
  install -d -o 10001 -g 10001 -m 755 "$folder"
done
