// Mixture-of-Experts layer.
#include "tandem/moe.h"

#include <fmt/format.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <memory>
#include <utility>
#include <vector>

#include "comm.h"
#include "integer.h"
#include "operand.h"
#include "receipts.h"
#include "tandem/dtype.h"
#include "tandem/error.h"
#include "tandem/strategy.h"
#include "wire.h"

namespace tandem::python {
namespace {

/// Batches of a layer no longer referenced by Python. Forward passes reuse them instead of
/// allocating.
using FreeBatches = std::vector<MoeBatch*>;

/// Saved activations from forward for backward; ends with the world, as its layer does.
class Batch {
 public:
  Batch(std::shared_ptr<Comm> comm, const std::shared_ptr<FreeBatches>& free)
      : comm_(std::move(comm)), free_(free) {
    if (free->empty()) {
      batch_ = comm_->adopt(std::make_unique<MoeBatch>());
    } else {
      batch_ = free->back();
      free->pop_back();
    }
  }
  Batch(const Batch&) = delete;
  ~Batch() {
    if (const auto free = free_.lock()) {
      free->push_back(batch_);
    } else {
      comm_->drop(batch_);
    }
  }

  MoeBatch& get() const {
    comm_->open("moe");
    return *batch_;
  }
  size_t bytes() const {
    comm_->open("moe");
    return batch_->bytes();
  }
  std::vector<int64_t> rows_of_experts() const {
    comm_->open("moe");
    const auto rows = batch_->rows_of_experts();
    return {rows.begin(), rows.end()};
  }

 private:
  const std::shared_ptr<Comm> comm_;
  const std::weak_ptr<FreeBatches> free_;
  MoeBatch* batch_ = nullptr;
};

class Layer : public Living<Layer> {
 public:
  Layer(std::shared_ptr<Comm> comm, const MoeShape& shape, const MoeOptions& options)
      : comm_(std::move(comm)), shape_(shape), trains_(options.backward) {
    comm_->refuse_capture("moe");
    receipts_ = collect_receipts([&] {
      layer_ = comm_->adopt(comm_->use(
          "moe", [&](Communicator& c) { return std::make_unique<MoeLayer>(c, shape, options); }));
    });
  }
  Layer(const Layer&) = delete;
  ~Layer() {
    for (MoeBatch* const batch : *free_) comm_->drop(batch);
    comm_->drop(layer_);
  }

  const MoeShape& shape() const { return shape_; }
  std::shared_ptr<Comm> comm() const { return comm_; }
  std::string dispatch_strategy() const {
    comm_->open("moe");
    return std::string(name_of(layer_->dispatch_strategy()));
  }
  std::string combine_strategy() const {
    comm_->open("moe");
    return std::string(name_of(layer_->combine_strategy()));
  }
  nb::object receipts() const {
    comm_->open("moe");
    return to_list(receipts_);
  }
  int64_t dropped_routings() const {
    comm_->refuse_capture("moe: dropped_routings");
    return comm_->use("moe", [&](Communicator&) { return layer_->dropped_routings(); });
  }
  std::string describe() const {
    return fmt::format(
        "<tandem.MoeLayer tokens {} hidden {} ffn {} experts {} top_k {} tp {} {}{}>",
        shape_.tokens, shape_.hidden, shape_.ffn, shape_.experts, shape_.top_k, shape_.tp,
        name_of(shape_.dtype), comm_->closed() ? ", closed" : "");
  }

  std::pair<nb::object, std::unique_ptr<Batch>> forward(nb::object x, nb::object experts,
                                                        nb::object weights, nb::object w_in,
                                                        nb::object w_out, nb::object out) {
    comm_->open("moe");
    const Operand rows(x, "moe", "x"), to(experts, "moe", "experts"), by(weights, "moe", "weights");
    const Operand in(w_in, "moe", "w_in"), down(w_out, "moe", "w_out");
    const bool fresh = out.is_none();
    if (fresh) out = like(x, rows);
    const Operand result(out, "moe", "out");
    if (trains_ && free_->empty()) comm_->refuse_capture("moe: a first forward pass");
    auto batch = std::make_unique<Batch>(comm_, free_);
    MoeBatch& saved = batch->get();
    comm_->use("moe", x, [&](Communicator&) {
      layer_->forward(rows.tensor(), {to.tensor(), by.tensor()}, in.tensor(), down.tensor(),
                      result.tensor(), saved);
    });
    return {written(x, std::move(out), fresh), std::move(batch)};
  }

  nb::tuple backward(const Batch& batch, nb::object dout, nb::object w_in, nb::object w_out,
                     nb::object dw_in, nb::object dw_out, nb::object dx, nb::object dweights) {
    MoeBatch& saved = batch.get();
    const Operand from(dout, "moe", "dout"), in(w_in, "moe", "w_in"), down(w_out, "moe", "w_out");
    const bool fresh_in = dw_in.is_none(), fresh_out = dw_out.is_none();
    const bool fresh_x = dx.is_none(), fresh_weights = dweights.is_none();
    if (fresh_x) dx = like(dout, from);
    if (fresh_weights) {
      dweights = new_result(dout, std::array{dx_rows(from), int64_t(shape_.top_k)}, "moe", "f32");
    }
    if (fresh_in) dw_in = like(dout, in, "f32");
    if (fresh_out) dw_out = like(dout, down, "f32");
    {
      const Operand to_x(dx, "moe", "dx"), to_weights(dweights, "moe", "dweights");
      const Operand to_in(dw_in, "moe", "dw_in"), to_out(dw_out, "moe", "dw_out");
      comm_->use("moe", dout, [&](Communicator&) {
        layer_->backward(from.tensor(), in.tensor(), down.tensor(), saved, to_x.tensor(),
                         to_weights.tensor(), to_in.tensor(), to_out.tensor(),
                         fresh_in && fresh_out ? WeightGradients::store : WeightGradients::add);
      });
    }
    return nb::make_tuple(
        written(dout, std::move(dx), fresh_x), written(dout, std::move(dweights), fresh_weights),
        written(dout, std::move(dw_in), fresh_in), written(dout, std::move(dw_out), fresh_out));
  }

 private:
  static int64_t dx_rows(const Operand& rows) {
    return rows.tensor().dims() ? rows.tensor().dim(0) : 0;
  }
  static nb::object like(nb::handle framework, const Operand& other, const char* dtype = nullptr) {
    std::vector<int64_t> shape;
    for (int i = 0; i < other.tensor().dims(); ++i) shape.push_back(other.tensor().dim(i));
    return new_result(framework, shape, "moe", dtype);
  }

  const std::shared_ptr<Comm> comm_;
  const MoeShape shape_;
  const bool trains_;
  const std::shared_ptr<FreeBatches> free_ = std::make_shared<FreeBatches>();
  MoeLayer* layer_ = nullptr;
  LayerReceipts receipts_;
};

void construct(Layer* self, std::shared_ptr<Comm> comm, const Integer& tokens,
               const Integer& hidden, const Integer& ffn, const Integer& experts,
               const Integer& top_k, const Integer& tp, nb::object dtype,
               const std::string& strategy, const Integer& chunks, nb::handle codec,
               nb::handle combine_codec, bool allow_uncompressed, bool backward,
               const std::string& save, bool strict) {
  const MoeShape shape{.tokens = tokens.to<int64_t>("moe", "tokens"),
                       .hidden = hidden.to<int64_t>("moe", "hidden"),
                       .ffn = ffn.to<int64_t>("moe", "ffn"),
                       .experts = experts.to<int>("moe", "experts"),
                       .top_k = top_k.to<int>("moe", "top_k"),
                       .tp = tp.to<int>("moe", "tp"),
                       .dtype = dtype_from(dtype)};
  const MoeOptions options{.strategy = strategy_from(strategy),
                           .chunks = chunks.to<int>("moe", "chunks"),
                           .dispatch = wire_from(codec),
                           .combine = wire_from(combine_codec),
                           .allow_uncompressed = allow_uncompressed,
                           .backward = backward,
                           .save = parse_moe_save(save),
                           .strict = strict};
  if (allow_uncompressed && options.dispatch.is_none() && options.combine.is_none()) {
    throw InvalidArgument("moe: allow_uncompressed without a codec: expected none");
  }
  new (self) Layer(std::move(comm), shape, options);
}

}  // namespace

void bind_moe(nb::module_& m) {
  nb::class_<Batch>(m, "MoeBatch", "What a forward pass leaves for its backward pass.")
      .def_prop_ro("bytes", &Batch::bytes, "Bytes of its memory for rows and activations.")
      .def_prop_ro("rows_of_experts", &Batch::rows_of_experts,
                   "Rows that each of this rank's experts computed, own ones and other ranks'. "
                   "Empty on GPU\nranks, whose host learns none.");
  nb::class_<Layer>(
      m, "MoeLayer", nb::is_weak_referenceable(),
      "A Mixture-of-Experts layer of SwiGLU experts on ep x tp ranks, ep = size / tp.\n\n"
      "tokens: the most rows that a rank brings; ffn: width inside one whole expert; experts: of\n"
      "all ranks, a multiple of ep. Rank r has shard_of(ffn, tp, r % tp) of the experts\n"
      "shard_of(experts, ep, r // tp). codec: wire format of rows sent to their experts, which\n"
      "are used as decoded; combine_codec: of the partial sums that return; allow_uncompressed:\n"
      "both are sent uncompressed if that is measured to be faster. The backward pass is\n"
      "uncompressed.\n"
      "backward: GPU ranks fill batches for it, which takes memory; CPU ranks always do. chunks:\n"
      "of each stage when overlapped; 0: chosen, as always on GPUs. save: rows that a batch\n"
      "keeps: 'sorted', each once for every expert; 'rows', each once; 'recompute', this rank's\n"
      "only, which a backward pass sends again; the same bits. On GPUs 'sorted'. GPU ranks: bf16 "
      "or f16, "
      "hidden\n"
      "a multiple of 8, ffn of 8 x tp. strict: as of AgGemm, for each pass; with backward the\n"
      "backward pass is checked too, otherwise its first call is. Collective to construct and to\n"
      "call. Raises\n"
      "InvalidArgument, Mismatch, Timeout, Aborted, and Unsupported for GPUs that it does not run "
      "on.")
      .def("__init__", &construct, nb::arg("comm"), nb::arg("tokens"), nb::arg("hidden"),
           nb::arg("ffn"), nb::arg("experts"), nb::arg("top_k") = 1, nb::arg("tp") = 1,
           nb::arg("dtype") = "f32", nb::kw_only(), nb::arg("strategy") = "automatic",
           nb::arg("chunks") = 0, nb::arg("codec") = nb::none(),
           nb::arg("combine_codec") = nb::none(), nb::arg("allow_uncompressed") = false,
           nb::arg("backward") = false, nb::arg("save") = "sorted", nb::arg("strict") = false)
      .def_prop_ro("comm", &Layer::comm)
      .def_prop_ro("tokens", [](const Layer& l) { return l.shape().tokens; })
      .def_prop_ro("hidden", [](const Layer& l) { return l.shape().hidden; })
      .def_prop_ro("ffn", [](const Layer& l) { return l.shape().ffn; })
      .def_prop_ro("experts", [](const Layer& l) { return l.shape().experts; })
      .def_prop_ro("top_k", [](const Layer& l) { return l.shape().top_k; })
      .def_prop_ro("tp", [](const Layer& l) { return l.shape().tp; })
      .def_prop_ro("dtype", [](const Layer& l) { return l.shape().dtype; })
      .def_prop_ro("dispatch_strategy", &Layer::dispatch_strategy,
                   "What was chosen for evenly spread rows before the experts: 'serial' or "
                   "'overlapped'.")
      .def_prop_ro("combine_strategy", &Layer::combine_strategy, "The same, behind the experts.")
      .def_prop_ro("receipts", &Layer::receipts, kReceiptsOfLayer)
      .def("dropped_routings", &Layer::dropped_routings,
           "Of this rank's rows so far, the choices that GPU ranks left out: of no expert, of one "
           "that the\nrow had, or by a weight that is not finite; on the CPU 0, as such a call "
           "raises Mismatch. Waits for\nthis rank's calls. Raises InvalidArgument while a CUDA "
           "graph is captured, Timeout, Aborted.")
      .def("__deepcopy__", [](nb::object self, nb::handle) { return self; })
      .def("__repr__", &Layer::describe)
      .def_static("_at", &Layer::at, nb::arg("address"))
      .def(
          "forward", &Layer::forward, nb::arg("x").none(), nb::arg("experts").none(),
          nb::arg("weights").none(), nb::arg("w_in").none(), nb::arg("w_out").none(),
          nb::arg("out") = nb::none(), nb::rv_policy::take_ownership,
          "(out, batch): out[t] = the sum over k of weights[t, k] * expert experts[t, k] of "
          "x[t].\n\n"
          "x: [rows, hidden]; experts: i32 [rows, top_k], -1: none; weights: f32 [rows, top_k]; "
          "w_in: "
          "[local\n"
          "experts * 2 * ffn shard, hidden], of each expert the gate's rows, then the up\n"
          "projection's; w_out: [local experts * hidden, ffn shard]; out: [rows, hidden], of the "
          "dtype or\n"
          "f32. Raises InvalidArgument, Timeout, Aborted, and on CPU ranks Mismatch on all of them "
          "for a\n"
          "routing to no expert, to one twice, or by a weight that is not finite; GPU ranks leave "
          "such a\n"
          "choice out and count it (dropped_routings).")
      .def("backward", &Layer::backward, nb::arg("batch"), nb::arg("dout").none(),
           nb::arg("w_in").none(), nb::arg("w_out").none(), nb::arg("dw_in") = nb::none(),
           nb::arg("dw_out") = nb::none(), nb::arg("dx") = nb::none(),
           nb::arg("dweights") = nb::none(),
           "(dx, dweights, dw_in, dw_out) of that batch's forward: [rows, hidden] of the dtype or "
           "f32, f32\n"
           "[rows, top_k], and f32 of the weights' shapes, which are added to; each is the one "
           "given or a new\n"
           "one. The batch stays as it is. Raises InvalidArgument, Mismatch, Timeout, Aborted.");
}

}  // namespace tandem::python
