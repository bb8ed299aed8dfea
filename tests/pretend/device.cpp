// A pretend CUDA device in host memory, for a torch that is built for CUDA on a machine that has no GPU.
//
// Every CUDA kernel is replaced by the CPU's, which runs on aliases of the same memory. What stands before the kernel
// are CUDA's own rules: tensors of two devices do not mix, a generator is the device's, a device tensor is not pinned.
// Where the host would wait for a GPU, a listener is told. Storage, autograd, autocast and accelerate see a "cuda".
#include "memory.h"

// ---- one kernel for all operators: turn the arguments to the host, run the CPU's kernel, turn the results back
// Operators that CUDA lets take tensors of the host beside the device's.
static const std::set<std::string> MAY_MIX = {
  "aten::copy_", "aten::_to_copy", "aten::_copy_from", "aten::set_.source_Tensor", "aten::index.Tensor",
  "aten::index.Tensor_out", "aten::index_put_", "aten::index_put", "aten::_index_put_impl_",
  "aten::_unsafe_index.Tensor", "aten::_unsafe_index_put", "aten::_amp_foreach_non_finite_check_and_unscale_"};
// Operators whose result has a size or a value that the host must know.
static const std::set<std::string> READS = {
  "aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::_unique", "aten::unique_dim",
  "aten::unique_consecutive", "aten::equal", "aten::bincount", "aten::repeat_interleave.Tensor", "aten::linalg_eigh",
  "aten::linalg_svd"};

static std::string name_of(const c10::OperatorHandle& op) {
  auto& name = op.operator_name();
  return name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
}

struct Turned { Tensor device, host; const void* data; };

struct Arguments {
  std::vector<Turned> turned;
  std::vector<std::string> strangers;  // of the host, where only the device's may be
  bool any_device = false, host_index = false, mask_index = false, factory = false;

  Tensor turn(const Tensor& t, bool written) {
    if (!t.defined()) return t;
    if (t.device().type() != CUDA_TYPE) {
      if (t.dim() > 0 || written) strangers.push_back(c10::str(t.device(), t.sizes(), written ? " (written)" : ""));
      return t;  // a number of the host may stand beside the device's tensors
    }
    any_device = true;
    for (auto& one : turned) if (one.device.is_same(t)) return one.host;
    turned.push_back({t, on_host(t), t.storage().data()});
    return turned.back().host;
  }

  IValue turn(const IValue& value, const c10::Argument& argument, const std::string& op) {
    bool written = argument.alias_info() && argument.alias_info()->isWrite();
    if (value.isTensor()) return turn(value.toTensor(), written);
    if (value.isTensorList()) {
      c10::List<Tensor> made;
      for (const Tensor& t : value.toTensorVector()) made.push_back(turn(t, written));
      return made;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> made;
      for (const std::optional<Tensor>& t : value.toOptionalTensorVector()) {
        if (!t.has_value() || !t->defined()) { made.push_back(std::nullopt); continue; }
        bool here = t->device().type() == CUDA_TYPE;
        host_index |= !here && t->dim() > 0;
        mask_index |= here && (t->scalar_type() == kBool || t->scalar_type() == kByte);
        made.push_back(turn(*t, written));
      }
      return made;
    }
    if (value.isDevice() && value.toDevice().type() == CUDA_TYPE) {
      factory = true;
      return Device(DeviceType::CPU);
    }
    if (value.isGenerator()) {
      auto of = value.toGenerator();
      TORCH_CHECK(of.device().type() == CUDA_TYPE, "Expected a 'cuda' device type for generator but found '",
                  of.device(), "' (", op, ")");
      return static_cast<PretendGenerator*>(of.unsafeGetGeneratorImpl())->inner;
    }
    if (value.isNone() && argument.type()->str().find("Generator") != std::string::npos) return device_stream;
    return value;
  }

  // What an operator resized or gave other memory.
  void follow() {
    for (auto& one : turned) {
      bool moved = one.host.storage().data() != one.data;
      if (!moved && one.host.sizes() == one.device.sizes() && one.host.strides() == one.device.strides()) continue;
      auto impl = one.device.unsafeGetTensorImpl();
      if (moved) impl->set_storage_keep_dtype(storage_as(one.host.storage(), CUDA_TYPE, true));
      impl->set_storage_offset(one.host.storage_offset());
      impl->set_sizes_and_strides(one.host.sizes(), one.host.strides());
    }
  }

  Tensor back(const Tensor& t) const {
    if (!t.defined() || t.device().type() == CUDA_TYPE) return t;
    for (auto& one : turned) if (one.host.is_same(t)) return one.device;
    if ((!any_device && !factory) || !t.has_storage()) return t;
    for (auto& one : turned)  // a view
      if (t.storage().data() != nullptr && t.storage().data() == one.host.storage().data())
        return relabel(t, one.device.storage(), CUDA_TYPE);
    return on_device(t);
  }
};

static void run_on_host(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const std::string name = name_of(op);
  const size_t count = schema.arguments().size(), begin = stack->size() - count;
  kernels_run++;
  Arguments arguments;
  for (size_t i = 0; i < count; i++)
    (*stack)[begin + i] = arguments.turn((*stack)[begin + i], schema.arguments()[i], name);
  if (!arguments.strangers.empty() && arguments.any_device && !MAY_MIX.count(name))
    TORCH_CHECK(false, "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and ",
                arguments.strangers[0], " (when checking ", name, ")");
  if (arguments.host_index) host_waits("copy", name + " by an index on the host");
  if (arguments.mask_index) host_waits("read", name + " by a mask");
  if (READS.count(name)) host_waits("read", name);
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  arguments.follow();
  for (size_t i = stack->size() - schema.returns().size(); i < stack->size(); i++) {
    IValue& value = (*stack)[i];
    if (value.isTensor()) value = arguments.back(value.toTensor());
    else if (value.isTensorList()) {
      c10::List<Tensor> made;
      for (const Tensor& t : value.toTensorVector()) made.push_back(arguments.back(t));
      value = made;
    }
  }
}

// ---- kernels of their own
static Tensor empty(c10::SymIntArrayRef size, std::optional<ScalarType> dtype, std::optional<Layout>,
                    std::optional<Device> device, std::optional<bool> pin, std::optional<MemoryFormat> format) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  if (device) check_ordinal(device->index());
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &device_memory, DispatchKeySet(DispatchKey::CUDA),
                                   dtype_or_default(dtype), format);
}
static Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<ScalarType> dtype,
                            std::optional<Layout>, std::optional<Device> device, std::optional<bool>) {
  if (device) check_ordinal(device->index());
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &device_memory,
                                           DispatchKeySet(DispatchKey::CUDA), dtype_or_default(dtype));
}
static Scalar local_scalar(const Tensor& t) {
  host_waits("read", "aten::_local_scalar_dense");
  return at::_local_scalar_dense(on_host(t));
}
static Tensor& copy(Tensor& self, const Tensor& from, bool non_blocking) {
  bool to_device = self.device().type() == CUDA_TYPE, from_device = from.device().type() == CUDA_TYPE;
  if (to_device != from_device && from.numel() > 0) {
    if (!non_blocking) host_waits(to_device ? "copy" : "read", "aten::copy_");
    else if (from_device) host_waits("race", "aten::copy_ to the host with non_blocking");
  }
  Tensor target = to_device ? on_host(self) : self, source = from_device ? on_host(from) : from;
  c10::impl::ExcludeDispatchKeyGuard quiet(c10::autograd_dispatch_keyset);
  target.copy_(source);
  return self;
}
static void record_stream(Tensor&, Stream) {}
static bool is_pinned(const Tensor&, std::optional<Device>) { return false; }
static int64_t math_attention(const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double, bool,
                              std::optional<double>, bool) { return 0; }
// The CPU has no product with a wider output.
static Tensor bmm_wide(const Tensor& a, const Tensor& b, ScalarType dtype) {
  TORCH_CHECK(a.device().type() == CUDA_TYPE && b.device().type() == CUDA_TYPE,
              "Expected all tensors to be on the same device");
  TORCH_CHECK(a.scalar_type() == b.scalar_type(), "expected same dtype");
  return on_device(at::bmm(on_host(a).to(dtype), on_host(b).to(dtype)));
}

// Views and the like, which touch no memory, what has a kernel above, and what must not look as if it could run.
static const std::set<std::string> LEAVE = {
  "aten::as_strided", "aten::view", "aten::_reshape_alias", "aten::unfold", "aten::view_as_real",
  "aten::view_as_complex", "aten::alias", "aten::set_", "aten::set_.source_Storage", "aten::set_.source_Tensor",
  "aten::set_.source_Storage_storage_offset", "aten::view.dtype", "aten::is_set_to", "aten::_has_same_storage_numel",
  "aten::_nested_view_from_buffer", "aten::_copy_from_and_resize", "aten::_efficientzerotensor", "aten::diagonal",
  "aten::expand", "aten::detach", "aten::_conj", "aten::_neg_view", "aten::empty.memory_format", "aten::empty_strided",
  "aten::_local_scalar_dense", "aten::copy_", "aten::record_stream", "aten::is_pinned", "aten::_fused_sdp_choice",
  "aten::bmm.dtype", "aten::_scaled_dot_product_flash_attention", "aten::_scaled_dot_product_efficient_attention",
  "aten::_scaled_dot_product_cudnn_attention"};
// Composites that choose a kernel by the device's name.
static const std::set<std::string> ALSO = {
  "aten::convolution", "aten::convolution_backward", "aten::_convolution", "aten::upsample_nearest2d",
  "aten::_native_batch_norm_legit", "aten::_batch_norm_impl_index", "aten::native_group_norm",
  "aten::native_group_norm_backward", "aten::_fused_adamw_", "aten::_fused_adam_", "aten::_scaled_mm",
  "aten::arange.start_out", "aten::randperm.generator_out", "aten::linspace.out", "aten::embedding_dense_backward",
  "aten::_cdist_forward", "aten::_cdist_backward", "aten::linalg_matrix_exp", "aten::index_add"};

static std::vector<std::unique_ptr<torch::Library>> libraries;

static int64_t install() {
  c10::impl::device_guard_impl_registry[(int)CUDA_TYPE].store(&guard);
  c10::SetAllocator(CUDA_TYPE, &device_memory, 255);
  std::map<std::string, std::unique_ptr<torch::Library>> by_namespace;
  auto library = [&](const std::string& space) -> torch::Library& {
    auto& of = by_namespace[space];
    if (!of) of = std::make_unique<torch::Library>(torch::Library::IMPL, space, DispatchKey::CUDA, __FILE__, __LINE__);
    return *of;
  };
  auto& dispatcher = c10::Dispatcher::singleton();
  int64_t replaced = 0;
  for (const auto& full : dispatcher.getAllOpNames()) {
    auto op = dispatcher.findOp(full);
    auto space = full.getNamespace();
    if (!op || !op->hasSchema() || !space || *space == "prims" || *space == "prim") continue;
    const std::string name = name_of(*op);
    bool cuda = op->hasKernelForDispatchKey(DispatchKey::CUDA), cpu = op->hasKernelForDispatchKey(DispatchKey::CPU);
    bool composite = op->hasKernelForDispatchKey(DispatchKey::CompositeExplicitAutograd);
    if (LEAVE.count(name) || !((cuda && (cpu || composite)) || ALSO.count(name))) continue;
    library(std::string(*space)).impl(name.substr(name.find("::") + 2).c_str(),
                                      torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
    replaced++;
  }
  auto& aten = library("aten");
  aten.impl("empty.memory_format", empty);
  aten.impl("empty_strided", empty_strided);
  aten.impl("_local_scalar_dense", local_scalar);
  aten.impl("copy_", copy);
  aten.impl("record_stream", record_stream);
  aten.impl("is_pinned", is_pinned);
  aten.impl("_fused_sdp_choice", math_attention);
  aten.impl("bmm.dtype", bmm_wide);
  for (auto& pair : by_namespace) libraries.push_back(std::move(pair.second));
  return replaced;
}

// ---- what the Python half calls
static Tensor get_rng() { return device_stream.get_state(); }
static void set_rng(const Tensor& state) { device_stream.set_state(state); }
static void resize(const Tensor& t, int64_t bytes) {  // FSDP2 frees and allocates the storage of gathered weights
  auto storage = t.storage();
  c10::DataPtr made = device_memory.allocate(bytes);
  if (bytes > 0 && storage.nbytes() > 0) memcpy(made.get(), storage.data(), std::min<size_t>(bytes, storage.nbytes()));
  storage.set_data_ptr_noswap(std::move(made));
  storage.set_nbytes(bytes);
}
static std::unique_ptr<torch::Library> own;

extern "C" {
int64_t p_install() {
  try {
    own = std::make_unique<torch::Library>(torch::Library::DEF, "pretend", std::nullopt, __FILE__, __LINE__);
    auto all = DispatchKey::CompositeExplicitAutograd;
    own->def("get_rng() -> Tensor", torch::dispatch(all, &get_rng));
    own->def("set_rng(Tensor state) -> ()", torch::dispatch(all, &set_rng));
    own->def("resize(Tensor t, int bytes) -> ()", torch::dispatch(all, &resize));
    own->def("on_host(Tensor t) -> Tensor", torch::dispatch(all, &on_host));
    return install();
  } catch (const std::exception& error) {
    fprintf(stderr, "%s\n", error.what());
    return -1;
  }
}
void p_set_devices(int count) { device_count = count; }
void p_set_limit(int64_t bytes) { limit_bytes = bytes; }
void p_set_sync_mode(int mode) { sync_mode = mode; }
int p_sync_mode() { return sync_mode; }
void p_set_listener(void (*told)(const char*, const char*)) { listener = told; }
int64_t p_live() { return live_bytes; }
int64_t p_peak() { return peak_bytes; }
void p_reset_peak() { peak_bytes = (int64_t)live_bytes; }
int64_t p_kernels() { return kernels_run; }
int p_current() { return current; }
int p_set_current(int index) {
  if (index >= device_count) return 1;
  current = index;
  return 0;
}
void p_seed(uint64_t seed) { device_stream.set_current_seed(seed); }
}
