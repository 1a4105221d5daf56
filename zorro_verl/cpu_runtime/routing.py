"""All requests of one prompt to one server, so that the prompt is computed once in the run and not once a server.

verl's load balancer remembers the server of each request's name and gives a new name to the server with the fewest
requests. Named after its prompt, a request follows its siblings, and prompts are still spread evenly.
"""

from collections.abc import Callable
from types import ModuleType

from zorro_verl.cpu_runtime.seeding import request_seed
from zorro_verl.wrapping import wrap_once


def route_by_prompt(llm_server: ModuleType) -> None:
    """Name requests after their prompts where verl's client asks the load balancer for a server."""
    wrap_once(llm_server.LLMServerClient, "_acquire_server", _named_after_its_prompt)


def _named_after_its_prompt(original: Callable) -> Callable:
    async def _acquire_server(self, request_id, **request):
        if self.config.actor_rollout_ref.rollout.name == "hf":
            request_id = f"prompt-{request_seed(0, request['prompt_ids']):x}"
        return await original(self, request_id, **request)

    return _acquire_server
