"""What code keeps from one call to the next outside of parameters and buffers: containers, objects, generators.

Plain numbers of modules (`relay.capture.guards.counters`) and tensors in their attributes
(`relay.capture.guards.plain_tensors`) are not here. `relay.capture` and `relay.partition` import this folder.
"""
