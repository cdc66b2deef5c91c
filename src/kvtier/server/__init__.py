"""OpenAI-compatible server: an asyncio front end, and the engine in a second process.

    clients --HTTP--> front end (this process) --commands--> engine process (EngineRunner)
                                               <--events, one frame per step--

The extra `server` installs fastapi, uvicorn, uvloop, httptools and more. Importing this package needs none of them.
"""
