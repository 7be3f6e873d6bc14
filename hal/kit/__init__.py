"""What a backend may be built on: queues, memory, kernels, and the op table over arrays.

Here live parts that several backends share: devices whose memory is accounted, devices in host memory, queues on
streams, kernels with one function for each pattern of accumulation, core programs made by hand, the self-test of a
device, and in `arrays` every op over a library like numpy. No device is here, and no vendor's library.

Backends, the conformance suite and tests may import it, and so may the packages of third parties; `relay` does not.
"""
