#!/bin/sh
# Makes the certificates in this directory, which tests of TLS between processes use. They are secret to nobody, and last
# for a hundred years; keys of the CAs are not kept.
set -eu
cd "$(dirname "$0")"
keys=$(mktemp -d)
trap 'rm -rf "$keys"' EXIT
new_key() { openssl ecparam -name prime256v1 -genkey -noout | openssl pkcs8 -topk8 -nocrypt -out "$1"; }

# authority FILE NAME: a CA.
authority() {
    new_key "$keys/$1.key"
    openssl req -x509 -new -key "$keys/$1.key" -subj "/CN=$2" -days 36500 -out "$1.pem" \
        -addext "basicConstraints=critical,CA:TRUE" -addext "keyUsage=critical,keyCertSign,cRLSign"
}

# process FILE CA KEY HOSTS [openssl's options of time]: a certificate of a process.
process() {
    file=$1 ca=$2 key=$3 hosts=$4
    shift 4
    [ -e "$key" ] || new_key "$key"
    printf 'subjectAltName=%s\nextendedKeyUsage=serverAuth,clientAuth\nbasicConstraints=CA:FALSE\n' "$hosts" >"$keys/ext"
    openssl req -new -key "$key" -subj "/CN=millrace test" -out "$keys/csr"
    openssl x509 -req -in "$keys/csr" -CA "$ca.pem" -CAkey "$keys/$ca.key" -CAcreateserial \
        -CAserial "$keys/serial" -extfile "$keys/ext" -out "$file" "$@"
}

rm -f ./*.pem ./*.key
authority ca "millrace test CA"
authority other-ca "another test CA"
process process.pem ca process.key DNS:localhost,IP:127.0.0.1,IP:::1 -days 36500
process other-host.pem ca process.key DNS:elsewhere.example -days 36500
process expired.pem ca process.key DNS:localhost,IP:127.0.0.1 -days -1
process stranger.pem other-ca stranger.key DNS:localhost,IP:127.0.0.1 -days 36500
