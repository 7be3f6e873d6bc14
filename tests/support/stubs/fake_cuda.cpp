// What PyTorch's autograd asks of a CUDA device while a graph is traced with fake tensors, and no more: a stand-in for
// a CUDA build of PyTorch on a machine that has none, preloaded into a process of its own by test_capture_on_cuda.py.
// It computes nothing. RELAY_FAKE_SDPA chooses what attention prefers: 1 flash, 2 memory-efficient, 3 cuDNN.

#include <ATen/Context.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/transformers/attention.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <cstdlib>

// at::getAccelerator and at::accelerator::getAccelerator: versions of PyTorch have the one or the other.
extern "C" std::optional<c10::DeviceType> _ZN2at14getAcceleratorEb(bool) { return c10::DeviceType::CUDA; }
extern "C" std::optional<c10::DeviceType> _ZN2at11accelerator14getAcceleratorEb(bool) { return c10::DeviceType::CUDA; }

namespace at {
struct CUDAHooks final : CUDAHooksInterface {
  explicit CUDAHooks(CUDAHooksArgs) {}
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
};
REGISTER_CUDA_HOOKS(CUDAHooks)
}  // namespace at

namespace {

constexpr auto kType = c10::DeviceType::CUDA;
const c10::Device kDevice(kType, 0);

struct Guard final : c10::impl::NoOpDeviceGuardImpl<kType> {
  c10::Device exchangeDevice(c10::Device) const override { return kDevice; }
  c10::Device getDevice() const override { return kDevice; }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  c10::Stream getStream(c10::Device) const noexcept override { return c10::Stream(c10::Stream::DEFAULT, kDevice); }
  c10::Stream exchangeStream(c10::Stream stream) const noexcept override { return stream; }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
};

int64_t choose(
    const at::Tensor&,
    const at::Tensor&,
    const at::Tensor&,
    const std::optional<at::Tensor>&,
    double,
    bool,
    std::optional<double>,
    bool) {
  auto& context = at::globalContext();
  const char* preferred = std::getenv("RELAY_FAKE_SDPA");
  const int64_t choice = preferred == nullptr ? 1 : std::atoi(preferred);
  const bool allowed = choice == 1 ? context.userEnabledFlashSDP()
      : choice == 2                ? context.userEnabledMemEfficientSDP()
                                   : context.userEnabledCuDNNSDP();
  return allowed ? choice : 0;
}

}  // namespace

extern "C" void fake_cuda() {
  c10::impl::DeviceGuardImplRegistrar registrar(kType, new Guard());
  at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&choose);
}
