"""OpenAI-compatible server: the engine in a process of its own, an asyncio front end in another.

    clients --HTTP--> front end (this process) --commands--> engine process (EngineRunner)
                                               <--events, one frame a step--

Extra `server`: fastapi, uvicorn, uvloop, httptools. Importing this package needs none of them.
"""
