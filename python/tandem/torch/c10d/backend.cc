// Backend "tandem" of torch.distributed for CPU tensors. Compiled on the user's machine against the
// user's PyTorch (tandem/torch/_compile.py).
#include <torch/csrc/utils/pybind.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "queue.h"
#include "reduce.h"
#include "tensors.h"
#include "world.h"

namespace tandem_c10d {
namespace {

using c10d::OpType;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using Milliseconds = std::chrono::milliseconds;

class TandemBackend;

/// Backends of this process, for its end.
class Open {
 public:
  void insert(TandemBackend* backend) {
    const std::lock_guard<std::mutex> lock(mutex_);
    all_.insert(backend);
  }
  void erase(TandemBackend* backend) {
    const std::lock_guard<std::mutex> lock(mutex_);
    all_.erase(backend);
  }
  std::set<TandemBackend*> all() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return all_;
  }
  /// Leaves a world without waiting for its other ranks, which may leave theirs in another order.
  void leave(std::unique_ptr<World> world) {
    const std::lock_guard<std::mutex> lock(mutex_);
    leaving_.emplace_back([world = std::move(world)]() mutable { world.reset(); });
  }
  /// Returns once all worlds are left.
  void join() {
    std::vector<std::thread> leaving;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      leaving = std::exchange(leaving_, {});
    }
    for (std::thread& thread : leaving) thread.join();
  }

 private:
  std::mutex mutex_;
  std::set<TandemBackend*> all_;
  std::vector<std::thread> leaving_;
};
Open& open_backends() {
  static auto* const open = new Open;  // a backend may end after static objects
  return *open;
}

class TandemBackend : public c10d::Backend {
 public:
  TandemBackend(const TandemTable& table, const GroupArguments& arguments)
      : Backend(arguments.rank, arguments.size),
        world_(std::make_unique<World>(table, arguments)),
        deadline_s_(arguments.deadline_s),
        options_(c10::make_intrusive<Options>("tandem", to_timeout(arguments.deadline_s))) {
    options_->global_ranks_in_group.assign(arguments.global_ranks.begin(),
                                           arguments.global_ranks.end());
    world_->require_same("backend tandem of torch.distributed",
                         arguments.wire.empty() ? "without a codec" : arguments.wire);
    queue_ = std::make_unique<CallQueue>([this] { world_->share_processors(size_); });
    open_backends().insert(this);
  }
  ~TandemBackend() override {
    shutdown();
    open_backends().erase(this);
  }

  const std::string getBackendName() const override { return "tandem"; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return options_; }
  bool supportsCoalescing() const override { return true; }
  void setTimeout(Milliseconds timeout) override {
    options_->timeout = timeout;
    deadline_s_ = to_seconds(timeout);
  }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return number_; }
  void abort() override {
    if (world_) world_->abort("the process group was aborted");
  }
  /// Waits for the group's calls, then leaves it.
  void shutdown() override {
    std::optional<pybind11::gil_scoped_release> unlocked;
    if (Py_IsInitialized() && PyGILState_Check()) unlocked.emplace();
    if (queue_) queue_->close();
    if (world_) open_backends().leave(std::move(world_));
  }
  uint64_t bytes_sent() const { return world_ ? world_->bytes_sent() : 0; }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) override {
    check_tensors("broadcast", tensors);
    check_root("broadcast", opts.rootRank, size_);
    return push(OpType::BROADCAST, "tandem:broadcast", tensors, tensors, opts.timeout,
                [tensors, root = int(opts.rootRank)](World& world) {
                  for (const at::Tensor& x : tensors) {
                    const at::Tensor data = flat(x);
                    world.broadcast(data.data_ptr(), data.nbytes(), root);
                    if (world.rank() != root) copy_back(data, x);
                  }
                });
  }

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) override {
    return sum_all(OpType::ALLREDUCE, tensors, opts);
  }
  WorkPtr allreduce_coalesced(Tensors& tensors,
                              const c10d::AllreduceCoalescedOptions& opts) override {
    return sum_all(OpType::ALLREDUCE_COALESCED, tensors, opts);
  }

  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& opts) override {
    check_tensors("reduce", tensors);
    check_count("reduce", "tensors", tensors.size(), 1);
    check_root("reduce", opts.rootRank, size_);
    check_op("reduce", tensors[0].scalar_type(), opts.reduceOp.op_);
    return push(OpType::REDUCE, "tandem:reduce", tensors, tensors, opts.timeout,
                [x = tensors[0], op = opts.reduceOp, root = opts.rootRank](World& world) {
                  const auto counts = world.shards(x.numel());
                  const at::Tensor shard =
                      Reducer(world, "reduce", op).reduce_scatter(flat(x), counts);
                  const bool is_root = world.rank() == root;
                  const at::Tensor all = at::empty({is_root ? x.numel() : 0}, x.options());
                  std::vector<int64_t> sent(counts.size(), 0);
                  sent[size_t(root)] = shard.numel();
                  const auto received = is_root ? counts : std::vector<int64_t>(counts.size(), 0);
                  exchange(world, shard, sent, all, received, x.element_size());
                  if (is_root) copy_back(all, x);
                });
  }

  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                    const c10d::AllgatherOptions& opts) override {
    check_count("all_gather", "inputs", inputs.size(), 1);
    check_count("all_gather", "lists of outputs", outputs.size(), 1);
    check_count("all_gather", "outputs", outputs[0].size(), size_t(size_));
    check_tensors("all_gather", inputs);
    check_tensors("all_gather", outputs[0]);
    check_like("all_gather", inputs[0], outputs[0][size_t(rank_)],
               outputs[0][size_t(rank_)].numel());
    return push(
        OpType::ALLGATHER, "tandem:all_gather", inputs, outputs[0], opts.timeout,
        [input = inputs[0], list = outputs[0]](World& world) { gather_list(world, input, list); });
  }
  WorkPtr allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                              const c10d::AllgatherOptions& opts) override {
    check_count("all_gather", "lists of outputs", outputs.size(), size_t(size_));
    check_tensors("all_gather", inputs);
    Tensors all;
    for (const Tensors& list : outputs) {
      check_count("all_gather", "outputs", list.size(), inputs.size());
      check_tensors("all_gather", list);
      all.insert(all.end(), list.begin(), list.end());
    }
    return push(OpType::ALLGATHER_COALESCED, "tandem:all_gather", inputs, all, opts.timeout,
                [inputs, outputs](World& world) {
                  for (size_t i = 0; i < inputs.size(); ++i) {
                    Tensors list;
                    for (const Tensors& of_rank : outputs) list.push_back(of_rank[i]);
                    gather_list(world, inputs[i], list);
                  }
                });
  }
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions& opts) override {
    return gather_into(OpType::_ALLGATHER_BASE, {output}, {input}, opts);
  }
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& opts) override {
    return gather_into(OpType::COALESCED, outputs, inputs, opts);
  }

  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs,
                 const c10d::GatherOptions& opts) override {
    check_root("gather", opts.rootRank, size_);
    check_count("gather", "inputs", inputs.size(), 1);
    check_tensors("gather", inputs);
    const bool is_root = rank_ == opts.rootRank;
    check_count("gather", "lists of outputs", outputs.size(), is_root ? 1 : 0);
    Tensors list = is_root ? outputs[0] : Tensors{};
    check_tensors("gather", list);
    if (is_root) check_count("gather", "outputs", list.size(), size_t(size_));
    return push(OpType::GATHER, "tandem:gather", inputs, list, opts.timeout,
                [input = inputs[0], list, root = opts.rootRank](World& world) {
                  std::vector<int64_t> sent(size_t(world.size()), 0), received = sent;
                  sent[size_t(root)] = input.numel();
                  if (!list.empty()) received = elements_of(list);
                  const at::Tensor all = at::empty({sum_of(received)}, input.options());
                  exchange(world, flat(input), sent, all, received, input.element_size());
                  split_back(all, list);
                });
  }
  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                  const c10d::ScatterOptions& opts) override {
    check_root("scatter", opts.rootRank, size_);
    check_count("scatter", "outputs", outputs.size(), 1);
    check_tensors("scatter", outputs);
    const bool is_root = rank_ == opts.rootRank;
    check_count("scatter", "lists of inputs", inputs.size(), is_root ? 1 : 0);
    Tensors list = is_root ? inputs[0] : Tensors{};
    check_tensors("scatter", list);
    if (is_root) check_count("scatter", "inputs", list.size(), size_t(size_));
    return push(OpType::SCATTER, "tandem:scatter", list, outputs, opts.timeout,
                [output = outputs[0], list, root = opts.rootRank](World& world) {
                  std::vector<int64_t> sent(size_t(world.size()), 0), received = sent;
                  received[size_t(root)] = output.numel();
                  if (!list.empty()) sent = elements_of(list);
                  const at::Tensor all =
                      list.empty() ? at::empty({0}, output.options()) : at::cat(flat_all(list));
                  const at::Tensor result = flat_result(output);
                  exchange(world, all, sent, result, received, output.element_size());
                  copy_back(result, output);
                });
  }

  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                         const c10d::ReduceScatterOptions& opts) override {
    check_count("reduce_scatter", "outputs", outputs.size(), 1);
    check_count("reduce_scatter", "lists of inputs", inputs.size(), 1);
    check_count("reduce_scatter", "inputs", inputs[0].size(), size_t(size_));
    check_tensors("reduce_scatter", outputs);
    check_tensors("reduce_scatter", inputs[0]);
    check_like("reduce_scatter", outputs[0], inputs[0][size_t(rank_)],
               inputs[0][size_t(rank_)].numel());
    check_op("reduce_scatter", outputs[0].scalar_type(), opts.reduceOp.op_);
    return push(OpType::REDUCE_SCATTER, "tandem:reduce_scatter", inputs[0], outputs, opts.timeout,
                [output = outputs[0], list = inputs[0], op = opts.reduceOp](World& world) {
                  const Reducer reducer(world, "reduce_scatter", op);
                  copy_back(reducer.reduce_scatter(at::cat(flat_all(list)), elements_of(list)),
                            output);
                });
  }
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& opts) override {
    return scatter_sums(OpType::_REDUCE_SCATTER_BASE, {output}, {input}, opts);
  }
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& opts) override {
    return scatter_sums(OpType::COALESCED, outputs, inputs, opts);
  }

  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                        std::vector<int64_t>& input_splits,
                        const c10d::AllToAllOptions& opts) override {
    check_tensors("all_to_all", {output, input});
    check_like("all_to_all", output, input, output.numel());
    const auto sent = row_counts("input", input, input_splits, size_);
    const auto received = row_counts("output", output, output_splits, size_);
    return push(OpType::ALLTOALL_BASE, "tandem:all_to_all", {input}, {output}, opts.timeout,
                [output, input, sent, received](World& world) {
                  const at::Tensor result = flat_result(output);
                  exchange(world, flat(input), sent, result, received, row_bytes_of(input));
                  copy_back(result, output);
                });
  }
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& opts) override {
    check_tensors("all_to_all", outputs);
    check_tensors("all_to_all", inputs);
    check_count("all_to_all", "outputs", outputs.size(), size_t(size_));
    check_count("all_to_all", "inputs", inputs.size(), size_t(size_));
    for (const at::Tensor& x : inputs) check_like("all_to_all", x, inputs[0], x.numel());
    for (const at::Tensor& x : outputs) check_like("all_to_all", x, inputs[0], x.numel());
    return push(OpType::ALLTOALL, "tandem:all_to_all", inputs, outputs, opts.timeout,
                [outputs, inputs](World& world) {
                  const auto received = elements_of(outputs);
                  const at::Tensor all = at::empty({sum_of(received)}, inputs[0].options());
                  exchange(world, at::cat(flat_all(inputs)), elements_of(inputs), all, received,
                           all.element_size());
                  split_back(all, outputs);
                });
  }

  WorkPtr send(Tensors& tensors, int peer, int tag) override {
    return message(OpType::SEND, tensors, peer, tag);
  }
  WorkPtr recv(Tensors& tensors, int peer, int tag) override {
    return message(OpType::RECV, tensors, peer, tag);
  }
  WorkPtr recvAnysource(Tensors& tensors, int tag) override {
    return message(OpType::RECVANYSOURCE, tensors, kTandemAnyPeer, tag);
  }

  WorkPtr barrier(const c10d::BarrierOptions& opts) override {
    return push(OpType::BARRIER, "tandem:barrier", {}, {}, opts.timeout,
                [](World& world) { world.barrier(); });
  }

  void startCoalescing() override { coalesced_.emplace(); }
  WorkPtr endCoalescing() override {
    TORCH_CHECK(coalesced_, "tandem: the end of coalescing without its start");
    c10::List<c10::intrusive_ptr<c10::ivalue::Future>> futures(
        c10::FutureType::create(c10::ListType::create(c10::TensorType::get())));
    for (const auto& work : *coalesced_) futures.push_back(work->getFuture());
    coalesced_.reset();
    return c10d::Work::create_from_future(c10::collectAll(futures));
  }

 private:
  static double to_seconds(Milliseconds timeout) {
    return std::clamp(std::chrono::duration<double>(timeout).count(), 0.001, 1e9);
  }
  static Milliseconds to_timeout(double seconds) { return Milliseconds(int64_t(seconds * 1000)); }
  double deadline_of(Milliseconds timeout) const {
    return timeout <= kNoTimeout ? deadline_s_.load() : to_seconds(timeout);
  }
  World& world() const {
    TORCH_CHECK(world_, "tandem: the process group was destroyed: expected an open one");
    return *world_;
  }
  c10::intrusive_ptr<CallWork> begin(OpType type, const char* title, const Tensors& inputs,
                                     const Tensors& outputs) {
    auto work = c10::make_intrusive<CallWork>(rank_, type, title, inputs, outputs, number_++);
    if (coalesced_) coalesced_->push_back(work);
    return work;
  }
  template <typename Call>
  WorkPtr push(OpType type, const char* title, const Tensors& inputs, const Tensors& outputs,
               Milliseconds timeout, Call call) {
    world();
    auto work = begin(type, title, inputs, outputs);
    queue_->push(work, [this, call = std::move(call), deadline = deadline_of(timeout)] {
      world_->set_deadline(deadline);
      call(*world_);
    });
    return work;
  }

  WorkPtr sum_all(OpType type, const Tensors& tensors, const c10d::AllreduceOptions& opts) {
    check_tensors("all_reduce", tensors);
    for (const at::Tensor& x : tensors) {
      check_op("all_reduce", x.scalar_type(), opts.reduceOp.op_);
      check_like("all_reduce", x, tensors[0], x.numel());
    }
    return push(type, "tandem:all_reduce", tensors, tensors, opts.timeout,
                [tensors, op = opts.reduceOp](World& world) {
                  const Reducer reducer(world, "all_reduce", op);
                  if (tensors.size() == 1) {
                    at::Tensor data = flat(tensors[0]);
                    reducer.all_reduce(data);
                    return copy_back(data, tensors[0]);
                  }
                  if (tensors.empty()) return;
                  at::Tensor all = at::cat(flat_all(tensors));
                  reducer.all_reduce(all);
                  split_back(all, tensors);
                });
  }
  WorkPtr gather_into(OpType type, const Tensors& outputs, const Tensors& inputs,
                      const c10d::AllgatherOptions& opts) {
    check_tensors("all_gather", inputs);
    check_tensors("all_gather", outputs);
    check_count("all_gather", "outputs", outputs.size(), inputs.size());
    for (size_t i = 0; i < inputs.size(); ++i) {
      check_like("all_gather", outputs[i], inputs[i], inputs[i].numel() * size_);
    }
    return push(type, "tandem:all_gather", inputs, outputs, opts.timeout,
                [outputs, inputs](World& world) {
                  for (size_t i = 0; i < inputs.size(); ++i) {
                    gather_equal(world, inputs[i], outputs[i]);
                  }
                });
  }
  WorkPtr scatter_sums(OpType type, const Tensors& outputs, const Tensors& inputs,
                       const c10d::ReduceScatterOptions& opts) {
    check_tensors("reduce_scatter", inputs);
    check_tensors("reduce_scatter", outputs);
    check_count("reduce_scatter", "outputs", outputs.size(), inputs.size());
    for (size_t i = 0; i < inputs.size(); ++i) {
      check_like("reduce_scatter", inputs[i], outputs[i], outputs[i].numel() * size_);
      check_op("reduce_scatter", inputs[i].scalar_type(), opts.reduceOp.op_);
    }
    return push(type, "tandem:reduce_scatter", inputs, outputs, opts.timeout,
                [outputs, inputs, op = opts.reduceOp](World& world) {
                  const Reducer reducer(world, "reduce_scatter", op);
                  for (size_t i = 0; i < inputs.size(); ++i) {
                    const std::vector<int64_t> counts(size_t(world.size()), outputs[i].numel());
                    copy_back(reducer.reduce_scatter(flat(inputs[i]), counts), outputs[i]);
                  }
                });
  }

  /// A message in flight: its work, its memory and the tensor it is copied to.
  struct InFlight {
    c10::intrusive_ptr<CallWork> work;
    at::Tensor data, to;
    std::string note;
    static void done(void* self, const TandemError* error, int source) {
      const std::unique_ptr<InFlight> message(static_cast<InFlight*>(self));
      std::exception_ptr failure;
      try {
        if (error) throw_error(*error, message->note);
        const at::AutoDispatchBelowADInplaceOrView raw;
        if (message->to.defined()) copy_back(message->data, message->to);
      } catch (...) {
        failure = std::current_exception();
      }
      message->data.reset();
      message->work->set_source(source);
      message->work->end(failure);
    }
  };
  static const char* title_of(OpType type) {  // as in profiles of PyTorch's backends
    if (type == OpType::SEND) return "tandem:send";
    return type == OpType::RECV ? "tandem:recv" : "tandem:recvAnySource";
  }
  WorkPtr message(OpType type, const Tensors& tensors, int peer, int tag) {
    const bool sends = type == OpType::SEND;
    const char* const what = sends ? "send" : "recv";
    check_tensors(what, tensors);
    check_count(what, "tensors", tensors.size(), 1);
    const at::AutoDispatchBelowADInplaceOrView raw;
    auto work = begin(type, title_of(type), tensors, tensors);
    const at::Tensor data = sends ? flat(tensors[0]) : flat_result(tensors[0]);
    auto in_flight = std::make_unique<InFlight>(
        InFlight{work, data, sends ? at::Tensor() : tensors[0], world().note()});
    world().post({.peer = peer,
                  .tag = tag,
                  .data = data.data_ptr(),
                  .bytes = data.nbytes(),
                  .sends = sends,
                  .deadline_s = deadline_s_,
                  .done = &InFlight::done,
                  .context = in_flight.get()});
    in_flight.release();  // NOLINT: `done` has it
    return work;
  }

  std::unique_ptr<World> world_;
  std::unique_ptr<CallQueue> queue_;
  std::atomic<double> deadline_s_;
  const c10::intrusive_ptr<Options> options_;
  std::atomic<uint64_t> number_ = 0;
  std::optional<std::vector<c10::intrusive_ptr<CallWork>>> coalesced_;
};

c10::intrusive_ptr<c10d::Backend> create(const pybind11::capsule& capsule,
                                         const c10::intrusive_ptr<c10d::Store>& store, int rank,
                                         int size, double deadline_s,
                                         const std::vector<int64_t>& global_ranks,
                                         const std::string& wire, bool allow_uncompressed) {
  const auto* const table =
      static_cast<const TandemTable*>(PyCapsule_GetPointer(capsule.ptr(), kTandemTableName));
  if (!table) throw pybind11::error_already_set();
  TORCH_CHECK(table->version == kTandemTableVersion, "tandem._core: table ", table->version,
              ": expected ", kTandemTableVersion);
  const pybind11::gil_scoped_release unlocked;
  return c10::make_intrusive<TandemBackend>(
      *table,
      GroupArguments{store, rank, size, deadline_s, global_ranks, wire, allow_uncompressed});
}

uint64_t bytes_sent(const c10::intrusive_ptr<c10d::Backend>& backend) {
  const auto* const tandem = dynamic_cast<TandemBackend*>(backend.get());
  TORCH_CHECK_VALUE(tandem, "bytes_sent: backend ", backend->getBackendName(), ": expected tandem");
  return tandem->bytes_sent();
}

/// At the end of the process: ends all groups; those of a process that failed are aborted first, so
/// that their ranks learn of it.
void close_all(bool failed) {
  const pybind11::gil_scoped_release unlocked;
  for (TandemBackend* const backend : open_backends().all()) {
    if (failed) backend->abort();
    backend->shutdown();
  }
  open_backends().join();
}

}  // namespace
}  // namespace tandem_c10d

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.def("create", &tandem_c10d::create);
  module.def("bytes_sent", &tandem_c10d::bytes_sent);
  module.def("close_all", &tandem_c10d::close_all);
}
