// Memory, devices, generators and hooks of the pretend device: see device.cpp.
#pragma once
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/Formatting.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/op_registration/op_registration.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <ATen/ops/bmm.h>
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/alloc_cpu.h>
#include <torch/library.h>

#include <atomic>
#include <map>
#include <set>

using namespace at;

static constexpr DeviceType CUDA_TYPE = DeviceType::CUDA;
static std::atomic<int64_t> live_bytes{0}, peak_bytes{0}, kernels_run{0}, limit_bytes{INT64_MAX};
static std::atomic<int> sync_mode{0};  // as torch.cuda.set_sync_debug_mode: 0 nothing, 1 tell, 2 raise
static int device_count = 1;
static thread_local DeviceIndex current = 0;
static void (*listener)(const char* kind, const char* op) = nullptr;
static Generator device_stream = at::detail::createCPUGenerator(1234);  // random numbers of the device's default

static void add_live(int64_t bytes) {
  if (live_bytes + bytes > limit_bytes) throw c10::OutOfMemoryError({__func__, __FILE__, __LINE__}, "CUDA out of memory");
  int64_t now = (live_bytes += bytes), before = peak_bytes;
  while (now > before && !peak_bytes.compare_exchange_weak(before, now)) {}
}

static void host_waits(const char* kind, const std::string& op) {
  if (sync_mode == 2) TORCH_CHECK(false, "called a synchronizing CUDA operation: ", op, " (", kind, ")");
  if (sync_mode == 1 && listener) listener(kind, op.c_str());
}

static void check_ordinal(DeviceIndex index) {
  TORCH_CHECK(index < device_count, "CUDA error: invalid device ordinal");
}

// ---- memory: the host's, counted
struct Allocation { void* data; int64_t bytes; };

struct PretendAllocator final : c10::Allocator {
  static void release(void* context) {
    auto made = static_cast<Allocation*>(context);
    if (!made) return;
    c10::free_cpu(made->data);
    live_bytes -= made->bytes;
    delete made;
  }
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) return {nullptr, nullptr, &release, Device(CUDA_TYPE, current)};
    add_live(bytes);
    void* data = c10::alloc_cpu(bytes);
    // A fresh page of the host is zero, a GPU's memory is not: what is read before it was written must show.
    memset(data, 0x7f, std::min<size_t>(bytes, 1 << 22));
    return {data, new Allocation{data, (int64_t)bytes}, &release, Device(CUDA_TYPE, current)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { memcpy(to, from, bytes); }
};
static PretendAllocator device_memory;

// ---- devices and streams: there are no streams, everything is done when the call returns
struct PretendGuard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return CUDA_TYPE; }
  Device exchangeDevice(Device next) const override {
    Device before(CUDA_TYPE, current);
    uncheckedSetDevice(next);
    return before;
  }
  Device getDevice() const override { return Device(CUDA_TYPE, current); }
  void setDevice(Device next) const override {
    check_ordinal(next.index());
    uncheckedSetDevice(next);
  }
  void uncheckedSetDevice(Device next) const noexcept override {
    if (next.index() >= 0) current = next.index();
  }
  Stream getStream(Device of) const override {
    return Stream(Stream::DEFAULT, Device(CUDA_TYPE, of.index() < 0 ? current : of.index()));
  }
  Stream getDefaultStream(Device of) const override { return getStream(of); }
  Stream getStreamFromGlobalPool(Device of, bool = false) const override { return getStream(of); }
  Stream getNewStream(Device of, int = 0) const override { return getStream(of); }
  Stream exchangeStream(Stream stream) const override { return getStream(stream.device()); }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
  void record(void** event, const Stream&, const DeviceIndex, const c10::EventFlag) const override { *event = (void*)1; }
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  DeviceIndex deviceCount() const noexcept override { return device_count; }
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const DeviceIndex) const override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const Stream&) const override {}
  double elapsedTime(void*, void*, const DeviceIndex) const override { return 0; }
};
static PretendGuard guard;

// ---- generators: the CPU's, under the device's name
struct PretendGenerator final : c10::GeneratorImpl {
  Generator inner;
  PretendGenerator(DeviceIndex index, Generator of)
      : c10::GeneratorImpl(Device(CUDA_TYPE, index), DispatchKeySet(DispatchKey::CUDA)), inner(std::move(of)) {}
  void set_current_seed(uint64_t seed) override { inner.set_current_seed(seed); }
  void set_offset(uint64_t) override {}
  uint64_t get_offset() const override { return 0; }
  uint64_t current_seed() const override { return inner.current_seed(); }
  uint64_t seed() override { return inner.seed(); }
  void set_state(const c10::TensorImpl& state) override { inner.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return inner.unsafeGetGeneratorImpl()->get_state(); }
  GeneratorImpl* clone_impl() const override { return new PretendGenerator(device().index(), inner.clone()); }
};
static Generator default_generator = at::make_generator<PretendGenerator>((DeviceIndex)0, device_stream);

// ---- what ATen asks of CUDA
namespace at {
struct PretendHooks : public CUDAHooksInterface {
  PretendHooks(CUDAHooksArgs = {}) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool hasCUDART() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  DeviceIndex current_device() const override { return current; }
  DeviceIndex deviceCount() const override { return device_count; }
  int getNumGPUs() const override { return device_count; }
  void setCurrentDevice(DeviceIndex index) const override { current = index; }
  DeviceIndex getCurrentDevice() const override { return current; }
  DeviceIndex exchangeDevice(DeviceIndex index) const override {
    auto before = current;
    if (index >= 0) current = index;
    return before;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex index) const override { return exchangeDevice(index); }
  bool isPinnedPtr(const void*) const override { return false; }
  Device getDeviceFromPtr(void*) const override { return Device(CUDA_TYPE, current); }
  const Generator& getDefaultGenerator(DeviceIndex = -1) const override { return default_generator; }
  Generator getNewGenerator(DeviceIndex index = -1) const override {
    return at::make_generator<PretendGenerator>(index < 0 ? current : index, at::detail::createCPUGenerator());
  }
  Allocator* getPinnedMemoryAllocator() const override { return c10::GetAllocator(DeviceType::CPU); }
  Allocator* getCUDADeviceAllocator() const override { return &device_memory; }
  void deviceSynchronize(DeviceIndex) const override {}
  bool hasCuDNN() const override { return false; }
  bool hasMAGMA() const override { return false; }
  bool compiledWithCuDNN() const override { return false; }
  long versionCuDNN() const override { return 0; }
  long versionRuntimeCuDNN() const override { return 0; }
  long versionCuDNNFrontend() const override { return 0; }
  long versionCUDART() const override { return 13000; }
};
}  // namespace at
static std::unique_ptr<CUDAHooksInterface> make_hooks(CUDAHooksArgs) { return std::make_unique<PretendHooks>(); }
// When this library is loaded, before libtorch_cuda's own: whoever is preferred and first stays.
static const bool registered = (CUDAHooksRegistry()->Register("CUDAHooks", make_hooks, c10::REGISTRY_PREFERRED), true);

// ---- the same memory under the other device's name
struct Kept { c10::Storage storage; int64_t bytes; };
static void release_kept(void* context) {
  auto kept = static_cast<Kept*>(context);
  live_bytes -= kept->bytes;
  delete kept;
}

// `counted`: the memory came from a CPU kernel and now belongs to the device.
static c10::Storage storage_as(const c10::Storage& storage, DeviceType type, bool counted) {
  int64_t bytes = counted ? (int64_t)storage.nbytes() : 0;
  if (counted) add_live(bytes);
  Device device = type == CUDA_TYPE ? Device(CUDA_TYPE, current) : Device(DeviceType::CPU);
  c10::Allocator* of = type == CUDA_TYPE ? (c10::Allocator*)&device_memory : c10::GetAllocator(DeviceType::CPU);
  c10::DataPtr data(const_cast<void*>(storage.data()), new Kept{storage, bytes}, &release_kept, device);
  return c10::Storage(c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(data), of, true);
}

static Tensor relabel(const Tensor& of, const c10::Storage& storage, DeviceType type) {
  auto key = type == CUDA_TYPE ? DispatchKey::CUDA : DispatchKey::CPU;
  auto made = at::detail::make_tensor<TensorImpl>(c10::Storage(storage), DispatchKeySet(key), of.dtype());
  auto impl = made.unsafeGetTensorImpl();
  impl->set_storage_offset(of.storage_offset());
  impl->set_sizes_and_strides(of.sizes(), of.strides());
  if (of.is_conj()) made._set_conj(true);
  if (of.is_neg()) made._set_neg(true);
  if (of.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  return made;
}

static Tensor on_host(const Tensor& t) {
  TORCH_CHECK(t.layout() == kStrided, "pretend device: only strided tensors, got ", t.layout());
  return relabel(t, storage_as(t.storage(), DeviceType::CPU, false), DeviceType::CPU);
}

static Tensor on_device(const Tensor& t) { return relabel(t, storage_as(t.storage(), CUDA_TYPE, true), CUDA_TYPE); }
