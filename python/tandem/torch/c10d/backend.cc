// Backend "tandem" of torch.distributed. Compiled on the user's machine against the user's PyTorch
// (tandem/torch/_compile.py).
#include <torch/csrc/utils/pybind.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <cstring>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "group.h"
#include "open.h"
#include "reduce.h"
#include "sparse.h"
#include "tensors.h"
#include "world.h"

namespace tandem_c10d {

/// Without a reference to Python's function: the backend may end without the GIL.
void prepare_gpus() {
  const pybind11::gil_scoped_acquire locked;
  pybind11::module_::import("tandem.torch._backend").attr("prepare_gpus")();
}

class TandemBackend : public c10d::Backend {
 public:
  TandemBackend(const TandemTable& table, const GroupArguments& arguments, const Gather& gather)
      : Backend(arguments.rank, arguments.size),
        group_(table, arguments, gather, &prepare_gpus),
        options_(c10::make_intrusive<Options>("tandem", to_timeout(arguments.deadline_s))) {
    options_->global_ranks_in_group.assign(arguments.global_ranks.begin(),
                                           arguments.global_ranks.end());
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
    group_.set_timeout(timeout);
  }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return group_.number(); }
  void abort() override { group_.abort(); }
  /// Waits for the group's calls, then leaves it.
  void shutdown() override {
    std::optional<pybind11::gil_scoped_release> unlocked;
    if (Py_IsInitialized() && PyGILState_Check()) unlocked.emplace();
    group_.close();
  }
  uint64_t bytes_sent() const { return group_.bytes_sent(); }

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
    check_list("reduce", "tensors", tensors, 1);
    check_root("reduce", opts.rootRank, size_);
    check_op("reduce", tensors[0].scalar_type(), opts.reduceOp.op_);
    return push(
        OpType::REDUCE, "tandem:reduce", tensors, tensors, opts.timeout,
        [x = tensors[0], op = opts.reduceOp, root = opts.rootRank](World& world) {
          const auto counts = world.shards(x.numel());
          const at::Tensor shard = Reducer(world, "reduce", op).reduce_scatter(flat(x), counts);
          const bool is_root = world.rank() == root;
          const at::Tensor all = at::empty({is_root ? x.numel() : 0}, x.options());
          std::vector<int64_t> sent(counts.size(), 0);
          sent[size_t(root)] = shard.numel();
          const auto received = is_root ? counts : std::vector<int64_t>(counts.size(), 0);
          world.all_to_all(shard.data_ptr(), sent, all.data_ptr(), received, x.element_size());
          if (is_root) copy_back(all, x);
        });
  }

  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                    const c10d::AllgatherOptions& opts) override {
    check_list("all_gather", "inputs", inputs, 1);
    check_count("all_gather", "lists of outputs", outputs.size(), 1);
    check_list("all_gather", "outputs", outputs[0], size_t(size_));
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
      check_list("all_gather", "outputs", list, inputs.size());
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
    check_list("gather", "inputs", inputs, 1);
    const bool is_root = rank_ == opts.rootRank;
    const Tensors list =
        list_of_root("gather", "lists of outputs", "outputs", outputs, is_root, size_);
    return push(OpType::GATHER, "tandem:gather", inputs, list, opts.timeout,
                [input = inputs[0], list, root = opts.rootRank](World& world) {
                  const Tensors none(size_t(world.size()), input.new_empty({0}));
                  exchange_lists(world, list_for(root, input, world.size()),
                                 list.empty() ? none : list);
                });
  }
  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                  const c10d::ScatterOptions& opts) override {
    check_root("scatter", opts.rootRank, size_);
    check_list("scatter", "outputs", outputs, 1);
    const bool is_root = rank_ == opts.rootRank;
    const Tensors list =
        list_of_root("scatter", "lists of inputs", "inputs", inputs, is_root, size_);
    return push(OpType::SCATTER, "tandem:scatter", list, outputs, opts.timeout,
                [output = outputs[0], list, root = opts.rootRank](World& world) {
                  const Tensors none(size_t(world.size()), output.new_empty({0}));
                  exchange_lists(world, list.empty() ? none : list,
                                 list_for(root, output, world.size()));
                });
  }

  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                         const c10d::ReduceScatterOptions& opts) override {
    check_list("reduce_scatter", "outputs", outputs, 1);
    check_count("reduce_scatter", "lists of inputs", inputs.size(), 1);
    check_list("reduce_scatter", "inputs", inputs[0], size_t(size_));
    check_like("reduce_scatter", outputs[0], inputs[0][size_t(rank_)],
               inputs[0][size_t(rank_)].numel());
    check_op("reduce_scatter", outputs[0].scalar_type(), opts.reduceOp.op_);
    return push(OpType::REDUCE_SCATTER, "tandem:reduce_scatter", inputs[0], outputs, opts.timeout,
                [output = outputs[0], list = inputs[0], op = opts.reduceOp](World& world) {
                  const Reducer reducer(world, "reduce_scatter", op);
                  copy_back(reducer.reduce_scatter(joined(list), elements_of(list)), output);
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
    TORCH_CHECK_VALUE(row_bytes_of(output) == row_bytes_of(input), "all_to_all: rows of ",
                      text_of(output.sizes()), " and ", text_of(input.sizes()),
                      ": expected rows of one size");
    const auto sent = row_counts("input", input, input_splits, size_);
    const auto received = row_counts("output", output, output_splits, size_);
    return push(OpType::ALLTOALL_BASE, "tandem:all_to_all", {input}, {output}, opts.timeout,
                [output, input, sent, received](World& world) {
                  const at::Tensor result = flat_result(output);
                  const at::Tensor data = flat(input);
                  world.all_to_all(data.data_ptr(), sent, result.data_ptr(), received,
                                   row_bytes_of(input));
                  copy_back(result, output);
                });
  }
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& opts) override {
    check_list("all_to_all", "outputs", outputs, size_t(size_));
    check_list("all_to_all", "inputs", inputs, size_t(size_));
    for (const at::Tensor& x : inputs) check_like("all_to_all", x, inputs[0], x.numel());
    for (const at::Tensor& x : outputs) check_like("all_to_all", x, inputs[0], x.numel());
    return push(OpType::ALLTOALL, "tandem:all_to_all", inputs, outputs, opts.timeout,
                [outputs, inputs](World& world) { exchange_lists(world, inputs, outputs); });
  }

  WorkPtr send(Tensors& tensors, int peer, int tag) override {
    return message(OpType::SEND, "tandem:send", tensors, peer, tag);
  }
  WorkPtr recv(Tensors& tensors, int peer, int tag) override {
    return message(OpType::RECV, "tandem:recv", tensors, peer, tag);
  }
  WorkPtr recvAnysource(Tensors& tensors, int tag) override {
    return message(OpType::RECVANYSOURCE, "tandem:recvAnySource", tensors, kTandemAnyPeer, tag);
  }

  WorkPtr barrier(const c10d::BarrierOptions& opts) override {
    group_.synchronize_gpu(opts.timeout);
    return push(OpType::BARRIER, "tandem:barrier", {}, {}, opts.timeout,
                [](World& world) { world.barrier(); });
  }

  void startCoalescing() override { group_.start_coalescing(); }
  WorkPtr endCoalescing() override { return group_.end_coalescing(); }

 private:
  static Milliseconds to_timeout(double seconds) { return Milliseconds(int64_t(seconds * 1000)); }
  template <typename Call>
  WorkPtr push(OpType type, const char* title, const Tensors& inputs, const Tensors& outputs,
               Milliseconds timeout, Call call) {
    return group_.push(type, title, inputs, outputs, timeout, std::move(call));
  }
  WorkPtr message(OpType type, const char* title, const Tensors& tensors, int peer, int tag) {
    check_list(type == OpType::SEND ? "send" : "recv", "tensors", tensors, 1);
    return group_.message(type, title, tensors[0], peer, tag);
  }

  WorkPtr sum_all(OpType type, const Tensors& tensors, const c10d::AllreduceOptions& opts) {
    if (tensors.size() > 0 && tensors[0].defined() && tensors[0].is_sparse()) {
      check_sparse_sum(tensors, opts.reduceOp.op_);
      return push(type, "tandem:all_reduce", tensors, tensors, opts.timeout,
                  [x = tensors[0]](World& world) { sum_sparse(world, x); });
    }
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
                  at::Tensor all = joined(tensors);
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

  Group group_;
  const c10::intrusive_ptr<Options> options_;
};

namespace {

/// `gather`: from bytes to the bytes of all ranks, to connect them.
c10::intrusive_ptr<c10d::Backend> create(const pybind11::capsule& capsule,
                                         const pybind11::function& gather, int rank, int size,
                                         double deadline_s,
                                         const std::vector<int64_t>& global_ranks,
                                         const std::string& wire, bool allow_uncompressed) {
  const auto* const table =
      static_cast<const TandemTable*>(PyCapsule_GetPointer(capsule.ptr(), kTandemTableName));
  if (!table) throw pybind11::error_already_set();
  TORCH_CHECK(table->version == kTandemTableVersion, "tandem._core: table ", text(table->version),
              ": expected ", text(kTandemTableVersion));
  const Gather gather_all = [&](const void* local, uint64_t bytes, void* all) {
    const pybind11::gil_scoped_acquire locked;
    const std::string gathered =
        gather(pybind11::bytes(static_cast<const char*>(local), bytes)).cast<std::string>();
    TORCH_CHECK(gathered.size() == bytes * size_t(size), "connect: the store has ",
                text(gathered.size()), " bytes: expected ", text(bytes * size_t(size)));
    std::memcpy(all, gathered.data(), gathered.size());
  };
  const pybind11::gil_scoped_release unlocked;
  return c10::make_intrusive<TandemBackend>(
      *table, GroupArguments{rank, size, deadline_s, global_ranks, wire, allow_uncompressed},
      gather_all);
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
