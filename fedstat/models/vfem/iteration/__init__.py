"""The published iteration (EM), and Newton steps of responses that are not normal.

``protocol`` with ``steps`` is for a normal response, ``glm_protocol`` with ``glm_steps`` for others.
``state`` is what the coordinator keeps, ``site_state`` what a site keeps; ``quasi_newton`` combines steps of
both.
"""
