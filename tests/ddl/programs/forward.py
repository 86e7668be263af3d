"""Forwards TCP connections: `forward.py FROM TO FIRST LAST`, from one address of this host to another, port by port."""

import asyncio
import sys

source, target = sys.argv[1:3]
ports = range(int(sys.argv[3]), int(sys.argv[4]) + 1)


async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Everything that comes, until the end."""
    try:
        while piece := await reader.read(65536):
            writer.write(piece)
            await writer.drain()
    except ConnectionError:
        pass
    writer.close()


async def serve(port: int) -> None:
    """Forward one port."""

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            other_reader, other_writer = await asyncio.open_connection(target, port)
        except OSError:
            writer.close()
            return
        await asyncio.gather(copy(reader, other_writer), copy(other_reader, writer))

    await asyncio.start_server(forward, source, port)


async def main() -> None:
    """Forward all of them."""
    for port in ports:
        await serve(port)
    print("ready", flush=True)
    await asyncio.Event().wait()


asyncio.run(main())
