// Context-parallel attention and the cross-attention layer.
#include "tandem/attention.h"

#include <fmt/format.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>

#include <array>
#include <memory>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "comm.h"
#include "integer.h"
#include "operand.h"
#include "receipts.h"
#include "tandem/cross_attention.h"
#include "tandem/dtype.h"

namespace tandem::python {
namespace {

constexpr const char* kContext = "context_attention";
constexpr const char* kCross = "cross_attention";

/// ((begin, count), (begin, count)) of head and tail.
using Range = std::pair<int64_t, int64_t>;
using Chunks = std::pair<Range, Range>;
Chunks to_chunks(const ContextChunks& chunks) {
  return {{chunks.head.begin, chunks.head.count}, {chunks.tail.begin, chunks.tail.count}};
}

/// `given`, or a new tensor of the framework and dtype of `like`, of the shape of `operand`.
struct Result {
  Result(nb::object given, nb::handle like, const std::vector<int64_t>& shape, const char* op,
         const char* dtype = nullptr)
      : fresh(given.is_none()),
        object(fresh ? new_result(like, shape, op, dtype) : std::move(given)) {}
  Result(nb::object given, nb::handle like, const Operand& operand, const char* op,
         const char* dtype = nullptr)
      : Result(std::move(given), like, shape_of(operand.tensor()), op, dtype) {}
  static std::vector<int64_t> shape_of(const Tensor& tensor) {
    std::vector<int64_t> shape;
    for (int i = 0; i < tensor.dims(); ++i) shape.push_back(tensor.dim(i));
    return shape;
  }

  bool fresh;
  nb::object object;
};

class ContextLayer : public Living<ContextLayer> {
 public:
  ContextLayer(std::shared_ptr<Comm> comm, const ContextAttention::Shape& shape,
               const ContextAttentionOptions& options)
      : comm_(std::move(comm)), shape_(shape) {
    if (shape_.keys == 0) shape_.keys = shape_.seq;
    receipts_ = collect_receipts([&] {
      attention_ = comm_->adopt(comm_->use(kContext, [&](Communicator& c) {
        return std::make_unique<ContextAttention>(c, shape_, options);
      }));
    });
  }
  ContextLayer(const ContextLayer&) = delete;
  ~ContextLayer() { comm_->drop(attention_); }

  const ContextAttention::Shape& shape() const { return shape_; }
  std::shared_ptr<Comm> comm() const { return comm_; }
  const ContextAttention& get() const {
    comm_->open(kContext);
    return *attention_;
  }
  const LayerReceipts& receipts() const {
    comm_->open(kContext);
    return receipts_;
  }

  nb::tuple forward(nb::object q, nb::object k, nb::object v, nb::object document_starts,
                    nb::object out, nb::object log_sums) {
    const int64_t rows = get().query_chunks().count();
    const Operand q_in(q, kContext, "q"), k_in(k, kContext, "k"), v_in(v, kContext, "v");
    std::optional<Operand> starts;
    if (!document_starts.is_none()) starts.emplace(document_starts, kContext, "document_starts");
    Result result(std::move(out), q, q_in, kContext);
    Result sums(std::move(log_sums), q, std::vector{shape_.batch * shape_.heads, rows}, kContext,
                "f32");
    {
      const Operand to(result.object, kContext, "out"), to_sums(sums.object, kContext, "log_sums");
      comm_->use(kContext, q, [&](Communicator&) {
        attention_->forward(q_in.tensor(), k_in.tensor(), v_in.tensor(), to.tensor(),
                            to_sums.tensor(), starts ? &starts->tensor() : nullptr);
      });
    }
    return nb::make_tuple(written(q, std::move(result.object), result.fresh),
                          written(q, std::move(sums.object), sums.fresh));
  }

  nb::tuple backward(nb::object q, nb::object k, nb::object v, nb::object out, nb::object log_sums,
                     nb::object dout, nb::object document_starts, nb::object dq, nb::object dk,
                     nb::object dv) {
    comm_->open(kContext);
    const Operand q_in(q, kContext, "q"), k_in(k, kContext, "k"), v_in(v, kContext, "v");
    const Operand result(out, kContext, "out"), sums(log_sums, kContext, "log_sums");
    const Operand from(dout, kContext, "dout");
    std::optional<Operand> starts;
    if (!document_starts.is_none()) starts.emplace(document_starts, kContext, "document_starts");
    Result q_out(std::move(dq), q, q_in, kContext), k_out(std::move(dk), q, k_in, kContext),
        v_out(std::move(dv), q, v_in, kContext);
    {
      const Operand to_q(q_out.object, kContext, "dq"), to_k(k_out.object, kContext, "dk"),
          to_v(v_out.object, kContext, "dv");
      comm_->use(kContext, q, [&](Communicator&) {
        attention_->backward(q_in.tensor(), k_in.tensor(), v_in.tensor(), result.tensor(),
                             sums.tensor(), from.tensor(), to_q.tensor(), to_k.tensor(),
                             to_v.tensor(), starts ? &starts->tensor() : nullptr);
      });
    }
    return nb::make_tuple(written(q, std::move(q_out.object), q_out.fresh),
                          written(q, std::move(k_out.object), k_out.fresh),
                          written(q, std::move(v_out.object), v_out.fresh));
  }

  std::string describe() const {
    return fmt::format(
        "<tandem.ContextAttention batch {} seq {} keys {} heads {} kv_heads {} head_dim {} {} "
        "{}{}>",
        shape_.batch, shape_.seq, shape_.keys, shape_.heads, shape_.kv_heads, shape_.head_dim,
        name_of(shape_.dtype), shape_.causal ? "causal" : "cross",
        comm_->closed() ? ", closed" : "");
  }

 private:
  const std::shared_ptr<Comm> comm_;
  ContextAttention::Shape shape_;
  ContextAttention* attention_ = nullptr;
  LayerReceipts receipts_;
};

/// Saved state of a forward pass; ends with the world, as its layer does.
class CrossBatch {
 public:
  explicit CrossBatch(std::shared_ptr<Comm> comm)
      : comm_(std::move(comm)), batch_(comm_->adopt(std::make_unique<CrossAttentionBatch>())) {}
  CrossBatch(const CrossBatch&) = delete;
  ~CrossBatch() { comm_->drop(batch_); }
  CrossAttentionBatch& get() const {
    comm_->open(kCross);
    return *batch_;
  }

 private:
  const std::shared_ptr<Comm> comm_;
  CrossAttentionBatch* batch_;
};

/// Weights of a call.
class Weights {
 public:
  Weights(nb::handle q, nb::handle k, nb::handle v, nb::handle out, nb::handle gate)
      : q_(q, kCross, "w_q"),
        k_(k, kCross, "w_k"),
        v_(v, kCross, "w_v"),
        out_(out, kCross, "w_out") {
    if (!gate.is_none()) gate_.emplace(gate, kCross, "gate");
  }
  CrossAttentionWeights get() const {
    return {q_.tensor(), k_.tensor(), v_.tensor(), out_.tensor(),
            gate_ ? gate_->tensor() : Tensor()};
  }

 private:
  const Operand q_, k_, v_, out_;
  std::optional<Operand> gate_;
};

class CrossLayer : public Living<CrossLayer> {
 public:
  CrossLayer(std::shared_ptr<Comm> comm, const CrossAttentionShape& shape,
             const ContextAttentionOptions& options)
      : comm_(std::move(comm)), shape_(shape) {
    receipts_ = collect_receipts([&] {
      layer_ = comm_->adopt(comm_->use(kCross, [&](Communicator& c) {
        return std::make_unique<CrossAttention>(c, shape_, options);
      }));
    });
  }
  CrossLayer(const CrossLayer&) = delete;
  ~CrossLayer() { comm_->drop(layer_); }

  const CrossAttentionShape& shape() const { return shape_; }
  std::shared_ptr<Comm> comm() const { return comm_; }
  const CrossAttention& get() const {
    comm_->open(kCross);
    return *layer_;
  }
  const LayerReceipts& receipts() const {
    comm_->open(kCross);
    return receipts_;
  }

  std::pair<nb::object, std::unique_ptr<CrossBatch>> forward(nb::object x, nb::object visual,
                                                             nb::object w_q, nb::object w_k,
                                                             nb::object w_v, nb::object w_out,
                                                             nb::object gate, nb::object out) {
    comm_->open(kCross);
    const Operand rows(x, kCross, "x"), features(visual, kCross, "visual");
    const Weights weights(w_q, w_k, w_v, w_out, gate);
    Result result(std::move(out), x, rows, kCross);
    auto batch = std::make_unique<CrossBatch>(comm_);
    {
      const Operand to(result.object, kCross, "out");
      CrossAttentionBatch& saved = batch->get();
      comm_->use(kCross, x, [&](Communicator&) {
        layer_->forward(rows.tensor(), features.tensor(), weights.get(), to.tensor(), saved);
      });
    }
    return {written(x, std::move(result.object), result.fresh), std::move(batch)};
  }

  nb::tuple backward(const CrossBatch& batch, nb::object dout, nb::object x, nb::object visual,
                     nb::object w_q, nb::object w_k, nb::object w_v, nb::object w_out,
                     nb::object gate, bool visual_gradient) {
    const CrossAttentionBatch& saved = batch.get();
    const Operand from(dout, kCross, "dout"), rows(x, kCross, "x");
    const Operand features(visual, kCross, "visual");
    const Weights weights(w_q, w_k, w_v, w_out, gate);
    const CrossAttentionWeights given = weights.get();
    const auto made = [&](const Tensor& like, const char* dtype = nullptr) -> nb::object {
      if (like.dims() == 0) return nb::none();
      return new_result(dout, Result::shape_of(like), kCross, dtype);
    };
    nb::object dx = made(rows.tensor());
    nb::object dvisual = made(visual_gradient ? features.tensor() : Tensor());
    nb::object d[5] = {made(given.q, "f32"), made(given.k, "f32"), made(given.v, "f32"),
                       made(given.out, "f32"), made(given.gate, "f32")};
    {
      const Operand to_x(dx, kCross, "dx");
      std::optional<Operand> to_visual;
      if (visual_gradient) to_visual.emplace(dvisual, kCross, "dvisual");
      const Weights gradients(d[0], d[1], d[2], d[3], d[4]);
      comm_->use(kCross, dout, [&](Communicator&) {
        layer_->backward(saved, from.tensor(), rows.tensor(), features.tensor(), given,
                         to_x.tensor(), to_visual ? to_visual->tensor() : Tensor(),
                         gradients.get());
      });
    }
    const auto done = [&](nb::object& each) {
      return each.is_none() ? each : written(dout, std::move(each), true);
    };
    return nb::make_tuple(done(dx), done(dvisual), done(d[0]), done(d[1]), done(d[2]), done(d[3]),
                          done(d[4]));
  }

  std::string describe() const {
    return fmt::format(
        "<tandem.CrossAttention batch {} text {} visual {} hidden {} features {} heads {} kv_heads "
        "{} head_dim {} {}{}{}>",
        shape_.batch, shape_.text, shape_.visual, shape_.hidden, shape_.features, shape_.heads,
        shape_.kv_heads, shape_.head_dim, name_of(shape_.dtype), shape_.gate ? " gate" : "",
        comm_->closed() ? ", closed" : "");
  }

 private:
  const std::shared_ptr<Comm> comm_;
  const CrossAttentionShape shape_;
  CrossAttention* layer_ = nullptr;
  LayerReceipts receipts_;
};

/// Properties of both classes.
template <typename Class>
void bind_common(nb::class_<Class>& bound) {
  bound.def_prop_ro("comm", &Class::comm)
      .def_prop_ro("batch", [](const Class& c) { return c.shape().batch; })
      .def_prop_ro("heads", [](const Class& c) { return c.shape().heads; })
      .def_prop_ro("kv_heads", [](const Class& c) { return c.shape().kv_heads; })
      .def_prop_ro("head_dim", [](const Class& c) { return c.shape().head_dim; })
      .def_prop_ro("dtype", [](const Class& c) { return c.shape().dtype; })
      .def_prop_ro(
          "forward_form", [](const Class& c) { return std::string(c.get().forward_form()); },
          "Name of the form that forward passes run: 'gather', 'ring', 'heads' or 'queries'; "
          "'local' on one\nrank, if causal with a rotary embedding.")
      .def_prop_ro(
          "backward_form", [](const Class& c) { return std::string(c.get().backward_form()); },
          "The same of backward passes; empty without them.")
      .def_prop_ro(
          "forward_bytes", [](const Class& c) { return c.get().forward_bytes(); },
          "Bytes that this rank sends in a forward pass, by formula: what Comm.bytes_sent counts.")
      .def_prop_ro(
          "backward_bytes", [](const Class& c) { return c.get().backward_bytes(); },
          "The same of a backward pass.")
      .def_prop_ro(
          "receipts", [](const Class& c) { return to_list(c.receipts()); }, kReceiptsOfLayer)
      .def("__deepcopy__", [](nb::object self, nb::handle) { return self; })
      .def("__repr__", &Class::describe);
}

void construct_context(ContextLayer* self, std::shared_ptr<Comm> comm, const Integer& seq,
                       const Integer& heads, const Integer& head_dim, nb::object dtype,
                       const Integer& kv_heads, const Integer& keys, const Integer& batch,
                       bool causal, const Integer& window, double rope_theta, bool contiguous,
                       const std::string& strategy, const std::string& form, bool backward,
                       bool strict) {
  const auto n = [](const Integer& value, const char* name) {
    return value.to<int64_t>(kContext, name);
  };
  ContextAttention::Shape shape{.batch = n(batch, "batch"),
                                .seq = n(seq, "seq"),
                                .keys = n(keys, "keys"),
                                .heads = n(heads, "heads"),
                                .kv_heads = n(kv_heads, "kv_heads"),
                                .head_dim = n(head_dim, "head_dim"),
                                .dtype = dtype_from(dtype),
                                .causal = causal,
                                .contiguous = contiguous,
                                .window = n(window, "window"),
                                .rope_theta = rope_theta};
  if (shape.kv_heads == 0) shape.kv_heads = shape.heads;
  new (self)
      ContextLayer(std::move(comm), shape, {strategy_from(strategy), form, backward, strict});
}

void bind_context(nb::module_& m) {
  nb::class_<ContextLayer> bound(
      m, "ContextAttention", nb::is_weak_referenceable(),
      "Attention of this rank's queries over the keys of all ranks.\n\n"
      "batch: sequences; seq, keys (0: seq): positions over all ranks; heads: of queries, a\n"
      "multiple of kv_heads; head_dim: even; dtype: f32 or bf16. causal: a query reads its own\n"
      "position and those before it, at most `window` of them if that is not 0; else every query\n"
      "reads every key. rope_theta: base of the rotary embedding by which queries and keys are\n"
      "rotated; 0: they are not. A rank has the rows context_chunks(seq, size, rank, contiguous)\n"
      "of each sequence, and of keys likewise. form: 'gather', 'ring', 'heads' (Ulysses) or\n"
      "'queries' (LV-XAttn), or '': the fastest that strategy allows. All forms give the same\n"
      "bits. backward: backward passes will run. strict: as of AgGemm; `form` asks for what it "
      "is.\n"
      "CPU ranks. Collective to construct and to call.\n"
      "Raises InvalidArgument, Mismatch on all ranks if they differ, Timeout, Aborted, "
      "Unsupported.");
  bound
      .def("__init__", &construct_context, nb::arg("comm"), nb::arg("seq"), nb::arg("heads"),
           nb::arg("head_dim"), nb::arg("dtype") = "f32", nb::kw_only(), nb::arg("kv_heads") = 0,
           nb::arg("keys") = 0, nb::arg("batch") = 1, nb::arg("causal") = true,
           nb::arg("window") = 0, nb::arg("rope_theta") = 0.0, nb::arg("contiguous") = false,
           nb::arg("strategy") = "automatic", nb::arg("form") = "", nb::arg("backward") = true,
           nb::arg("strict") = false)
      .def_prop_ro("seq", [](const ContextLayer& a) { return a.shape().seq; })
      .def_prop_ro("keys", [](const ContextLayer& a) { return a.shape().keys; })
      .def_prop_ro(
          "query_chunks", [](const ContextLayer& a) { return to_chunks(a.get().query_chunks()); },
          "Positions of this rank's rows of q: ((begin, count), (begin, count)), head and tail.")
      .def_prop_ro(
          "key_chunks", [](const ContextLayer& a) { return to_chunks(a.get().key_chunks()); },
          "The same of k and v.")
      .def(
          "forward", &ContextLayer::forward, nb::arg("q").none(), nb::arg("k").none(),
          nb::arg("v").none(), nb::arg("document_starts") = nb::none(), nb::arg("out") = nb::none(),
          nb::arg("log_sums") = nb::none(),
          "(out, log_sums).\n\n"
          "q: [batch * this rank's rows, heads * head_dim], the rows of a sequence next to each\n"
          "other; k, v: [batch * this rank's keys, kv_heads * head_dim]; document_starts: i32 [1,\n"
          "batch * seq], equal on all ranks, the position at which each position's document\n"
          "begins; log_sums: f32 [batch * heads, rows of a sequence], for backward. Raises\n"
          "InvalidArgument naming the operand, Timeout, Aborted.")
      .def(
          "backward", &ContextLayer::backward, nb::arg("q").none(), nb::arg("k").none(),
          nb::arg("v").none(), nb::arg("out").none(), nb::arg("log_sums").none(),
          nb::arg("dout").none(), nb::arg("document_starts") = nb::none(),
          nb::arg("dq") = nb::none(), nb::arg("dk") = nb::none(), nb::arg("dv") = nb::none(),
          "(dq, dk, dv) of the forward pass that took and gave these: overwritten, or new ones. dk "
          "and dv are\nthose of this rank's keys, by the queries of all ranks. Raises "
          "InvalidArgument, Timeout, Aborted.");
  bind_common(bound);
  m.def(
      "context_chunks",
      [](const Integer& positions, const Integer& ranks, const Integer& rank, bool contiguous) {
        return to_chunks(context_chunks(positions.to<int64_t>("context_chunks", "positions"),
                                        ranks.to<int>("context_chunks", "ranks"),
                                        rank.to<int>("context_chunks", "rank"), contiguous));
      },
      nb::arg("positions"), nb::arg("ranks"), nb::arg("rank"), nb::arg("contiguous") = false,
      "Positions of a rank's rows of a sequence: ((begin, count), (begin, count)). Chunks rank "
      "and\n"
      "2 * ranks - 1 - rank of 2 * ranks, which balances causal attention; contiguous:\n"
      "shard_of(positions, ranks, rank) and no tail. Raises InvalidArgument.");
}

void construct_cross(CrossLayer* self, std::shared_ptr<Comm> comm, const Integer& text,
                     const Integer& visual, const Integer& hidden, const Integer& features,
                     const Integer& heads, const Integer& head_dim, nb::object dtype,
                     const Integer& kv_heads, const Integer& batch, bool gate,
                     const std::string& strategy, const std::string& form, bool backward,
                     bool strict) {
  const auto n = [](const Integer& value, const char* name) {
    return value.to<int64_t>(kCross, name);
  };
  CrossAttentionShape shape{.batch = n(batch, "batch"),
                            .text = n(text, "text"),
                            .visual = n(visual, "visual"),
                            .hidden = n(hidden, "hidden"),
                            .features = n(features, "features"),
                            .heads = n(heads, "heads"),
                            .kv_heads = n(kv_heads, "kv_heads"),
                            .head_dim = n(head_dim, "head_dim"),
                            .dtype = dtype_from(dtype),
                            .gate = gate};
  if (shape.kv_heads == 0) shape.kv_heads = shape.heads;
  new (self) CrossLayer(std::move(comm), shape, {strategy_from(strategy), form, backward, strict});
}

void bind_cross(nb::module_& m) {
  nb::class_<CrossBatch>(m, "CrossAttentionBatch",
                         "Saved state of a forward pass of CrossAttention for its backward pass.")
      .def_prop_ro(
          "bytes", [](const CrossBatch& b) { return b.get().bytes(); },
          "Bytes of its memory, which does not grow with the visual positions.");
  nb::class_<CrossLayer> bound(
      m, "CrossAttention", nb::is_weak_referenceable(),
      "Cross-attention of text rows over visual features that are divided among ranks "
      "(LV-XAttn).\n\n"
      "text, visual: positions over all ranks; rank r has the rows shard_of(text, size, r) and\n"
      "shard_of(visual, size, r) of each of `batch` sequences. hidden: columns of x; features: of\n"
      "visual rows; heads, kv_heads, head_dim, dtype, strategy, form, backward, strict: as of\n"
      "ContextAttention. gate: the result is multiplied by tanh(gate), f32 [1]. Keys and values\n"
      "are projected here and are not saved: backward computes them again. Weights are equal on\n"
      "all ranks. CPU ranks. Collective to construct and to call. Raises InvalidArgument, "
      "Mismatch\n"
      "on all ranks if they differ, Timeout, Aborted, Unsupported.");
  bound
      .def("__init__", &construct_cross, nb::arg("comm"), nb::arg("text"), nb::arg("visual"),
           nb::arg("hidden"), nb::arg("features"), nb::arg("heads"), nb::arg("head_dim"),
           nb::arg("dtype") = "f32", nb::kw_only(), nb::arg("kv_heads") = 0, nb::arg("batch") = 1,
           nb::arg("gate") = false, nb::arg("strategy") = "automatic", nb::arg("form") = "",
           nb::arg("backward") = true, nb::arg("strict") = false)
      .def_prop_ro("text", [](const CrossLayer& l) { return l.shape().text; })
      .def_prop_ro("visual", [](const CrossLayer& l) { return l.shape().visual; })
      .def_prop_ro("hidden", [](const CrossLayer& l) { return l.shape().hidden; })
      .def_prop_ro("features", [](const CrossLayer& l) { return l.shape().features; })
      .def_prop_ro("gate", [](const CrossLayer& l) { return l.shape().gate; })
      .def("forward", &CrossLayer::forward, nb::arg("x").none(), nb::arg("visual").none(),
           nb::arg("w_q").none(), nb::arg("w_k").none(), nb::arg("w_v").none(),
           nb::arg("w_out").none(), nb::arg("gate") = nb::none(), nb::arg("out") = nb::none(),
           nb::rv_policy::take_ownership,
           "(out, batch).\n\n"
           "x, out: [batch * this rank's text rows, hidden]; visual: [batch * this rank's visual\n"
           "rows, features]; w_q: [heads * head_dim, hidden]; w_k, w_v: [kv_heads * head_dim,\n"
           "features]; w_out: [hidden, heads * head_dim]; gate: f32 [1], if constructed with one.\n"
           "Raises InvalidArgument naming the operand, Timeout, Aborted.")
      .def("backward", &CrossLayer::backward, nb::arg("batch"), nb::arg("dout").none(),
           nb::arg("x").none(), nb::arg("visual").none(), nb::arg("w_q").none(),
           nb::arg("w_k").none(), nb::arg("w_v").none(), nb::arg("w_out").none(),
           nb::arg("gate") = nb::none(), nb::kw_only(), nb::arg("visual_gradient") = true,
           "(dx, dvisual, dw_q, dw_k, dw_v, dw_out, dgate) of that batch's forward pass, with its\n"
           "operands. dvisual is None without visual_gradient, dgate without a gate. Gradients of\n"
           "weights are f32 and of this rank's rows: sum them over ranks. Raises InvalidArgument,\n"
           "Timeout, Aborted.");
  bind_common(bound);
}

}  // namespace

void bind_attention(nb::module_& m) {
  bind_context(m);
  bind_cross(m);
}

}  // namespace tandem::python
