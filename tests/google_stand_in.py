"""A stand-in for Google Cloud Storage: moto's S3 behind a proxy that translates the headers of Google's XML API.

Google's own documentation describes its XML API as interoperable with S3: paths, listings and parts are the same, while
conditions (``x-goog-if-generation-match``) and metadata (``x-goog-meta-``) have names of their own. Nothing here is
Google's: it shows what our client sends and how it takes the answers, and not that Google's servers do the same.
"""

from __future__ import annotations

from tests.s3_server import KEY_ID, ForwardingHandler


class GoogleHandler(ForwardingHandler):
    """Forwards one connection's requests in S3's words, and its answers in Google's."""

    def to_server(self, headers: dict[str, str]) -> dict[str, str]:
        # Without any credentials, as an emulator is asked, moto takes nothing.
        sent = {"Authorization": f"AWS4-HMAC-SHA256 Credential={KEY_ID}/20260101/us-east-1/s3/aws4_request"}
        for name, value in headers.items():
            if name.lower() == "x-goog-if-generation-match":
                # 0 is no object: the only condition that we give.
                assert value == "0"
                sent["If-None-Match"] = "*"
            elif name.lower() != "authorization":
                sent[name.lower().replace("x-goog-meta-", "x-amz-meta-")] = value
        return sent

    def to_client(self, headers: dict[str, str]) -> dict[str, str]:
        return {name.lower().replace("x-amz-meta-", "x-goog-meta-"): value for name, value in headers.items()}
