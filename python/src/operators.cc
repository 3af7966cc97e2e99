// Overlap operators: one class, and for each row of the registry a Python class derived from it.
#include <fmt/format.h>
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <ctime>
#include <memory>
#include <optional>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "comm.h"
#include "integer.h"
#include "operand.h"
#include "overlap/registry.h"
#include "receipts.h"
#include "tandem/collectives.h"
#include "tandem/error.h"
#include "wire.h"

namespace tandem::python {
namespace {

struct Options {
  bool bias = false, weight_kn = false;
  std::string strategy = "automatic";
  int chunks = 0;
  Wire codec = {};
  bool allow_uncompressed = false;
  bool strict = false;
  bool extra = false;  ///< keep_gathered or add_norm
  nb::object out_dtype = nb::none();
  std::string scaling = "tensor";
};

Scaling scaling_from(std::string_view op, std::string_view name) {
  for (const auto each : {Scaling::tensor, Scaling::row}) {
    if (name == name_of(each)) return each;
  }
  throw InvalidArgument(fmt::format("{}: scaling '{}': expected tensor or row", op, name));
}

/// Scales of a call, each viewed as a vector; none if neither is given.
class GivenScales {
 public:
  GivenScales(const char* op, nb::handle x, nb::handle weight) {
    if (x.is_none() != weight.is_none()) {
      throw InvalidArgument(fmt::format("{}: {} missing: expected both scales, or none", op,
                                        x.is_none() ? "x_scale" : "weight_scale"));
    }
    if (x.is_none()) return;
    x_.emplace(x, op, "x_scale");
    weight_.emplace(weight, op, "weight_scale");
    scales_ = {vector_of(op, "x_scale", x_->tensor()),
               vector_of(op, "weight_scale", weight_->tensor())};
  }
  const Scales* get() const { return x_ ? &scales_ : nullptr; }

 private:
  static Tensor vector_of(const char* op, const char* name, const Tensor& t) {
    if (!t.contiguous()) {
      throw InvalidArgument(
          fmt::format("{}: {}: {} with gaps: expected it contiguous", op, name, t.describe()));
    }
    return Tensor(t.data(), t.dtype(), {t.elements()}, t.device());
  }
  std::optional<Operand> x_, weight_;
  Scales scales_;
};

OverlapOptions options_from(const char* op, const Options& options) {
  OverlapOptions how{strategy_from(options.strategy), options.chunks};
  how.wire = options.codec;
  if (options.allow_uncompressed && how.wire.is_none()) {
    throw InvalidArgument(fmt::format("{}: allow_uncompressed without a codec: expected none", op));
  }
  how.allow_uncompressed = options.allow_uncompressed;
  how.strict = options.strict;
  return how;
}

template <typename>
using same_as_bool = bool;

double thread_seconds() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return double(now.tv_sec) + 1e-9 * double(now.tv_nsec);
}

/// Operator of a row of the registry.
class Operator : public Living<Operator> {
 public:
  Operator(const OperatorRow& row, std::shared_ptr<Comm> comm, int64_t m, int64_t n, int64_t k,
           nb::handle dtype, const Options& options)
      : row_(row),
        comm_(std::move(comm)),
        shape_{.m = m, .n = n, .k = k, .dtype = dtype_from(dtype)} {
    shape_.bias = options.bias;
    shape_.weight_kn = options.weight_kn;
    shape_.keep_gathered = row.keep_gathered && options.extra;
    shape_.add_norm = row.add_norm && options.extra;
    set_result(options);
    const OverlapOptions how = options_from(name(), options);
    shape_.wire = how.wire;
    shape_.allow_uncompressed = how.allow_uncompressed;
    comm_->refuse_capture(name());
    op_ = comm_->adopt(comm_->use(name(), [&](Communicator& c) {
      return make_operator(row, c, row.describe(c, shape_), how, Choosing::fastest);
    }));
  }
  Operator(const Operator&) = delete;
  ~Operator() { comm_->drop(op_); }

  nb::object product(nb::object x, nb::object weight, nb::object out, nb::object bias,
                     nb::object x_scale, nb::object weight_scale) {
    comm_->open(name());
    const GivenScales scales(name(), x_scale, weight_scale);
    const Operand a(x, name(), "x"), b(weight, name(), "weight");
    std::optional<Operand> added;
    if (!bias.is_none()) added.emplace(bias, name(), "bias");
    const bool fresh = out.is_none();
    if (fresh) out = new_out(x);
    const Operand c(out, name(), "out");
    comm_->use(name(), x, [&](Communicator&) {
      op_->run(
          {a.tensor(), b.tensor(), c.tensor(), added ? &added->tensor() : nullptr, scales.get()});
    });
    return written(x, std::move(out), fresh);
  }

  /// GemmAr with residual and RMSNorm: (out, hidden).
  nb::object product_and_norm(nb::object x, nb::object weight, nb::object out, nb::object bias,
                              nb::object x_scale, nb::object weight_scale, nb::object residual,
                              nb::object gain, nb::object hidden, double eps) {
    if (residual.is_none() && gain.is_none() && hidden.is_none()) {
      return product(std::move(x), std::move(weight), std::move(out), std::move(bias),
                     std::move(x_scale), std::move(weight_scale));
    }
    comm_->open(name());
    const GivenScales scales(name(), x_scale, weight_scale);
    const Operand a(x, name(), "x"), b(weight, name(), "weight");
    const Operand stream(residual, name(), "residual"), by(gain, name(), "gain");
    std::optional<Operand> added;
    if (!bias.is_none()) added.emplace(bias, name(), "bias");
    const bool fresh_out = out.is_none(), fresh_hidden = hidden.is_none();
    if (fresh_out) out = new_out(x);
    if (fresh_hidden) hidden = new_out(x);
    {
      const Operand c(out, name(), "out"), to(hidden, name(), "hidden");
      const AddNorm norm{stream.tensor(), by.tensor(), to.tensor(), float(eps)};
      comm_->use(name(), x, [&](Communicator&) {
        op_->run({a.tensor(), b.tensor(), c.tensor(), added ? &added->tensor() : nullptr,
                  scales.get(), &norm});
      });
    }
    return nb::make_tuple(written(x, std::move(out), fresh_out),
                          written(x, std::move(hidden), fresh_hidden));
  }

  /// Copy of the gather that AgGemm saves, since that ends with the operator.
  nb::object gathered(nb::object like, nb::object out, bool with_local) {
    comm_->open(name());
    const Tensor whole = op_->gathered();
    const bool fresh = out.is_none();
    if (fresh) out = new_result(like, std::array{shape_.m, shape_.k}, name());
    {
      const Operand to(out, name(), "out");
      const Tensor& t = to.tensor();
      if (t.describe() != whole.describe() || !t.contiguous() || t.read_only() ||
          t.device() != whole.device()) {
        throw InvalidArgument(fmt::format("{}: gathered: out: {}: expected contiguous, writable {}",
                                          name(), t.describe(), whole.describe()));
      }
      comm_->use(name(), like, [&](Communicator& c) {  // which may have been closed since
        if (with_local) return copy_rows(t, whole);
        const Shard local = shard_of(shape_.m, c.size(), c.rank());
        const int64_t end = local.begin + local.count;
        copy_rows(t.rows(0, local.begin), whole.rows(0, local.begin));
        copy_rows(t.rows(end, shape_.m - end), whole.rows(end, shape_.m - end));
      });
    }
    return written(like, std::move(out), fresh);
  }

  nb::object gradient(nb::object x, nb::object dy, nb::object out) {
    comm_->open(name());
    const Operand a(x, name(), "x"), b(dy, name(), "dy");
    const bool fresh = out.is_none();
    if (fresh) out = new_out(x);
    const Operand c(out, name(), "out");
    comm_->use(name(), x, [&](Communicator&) { op_->run({a.tensor(), b.tensor(), c.tensor()}); });
    return written(x, std::move(out), fresh);
  }

  /// CPU seconds of `count` calls made from C++; the rest of a Python call's time is binding
  /// overhead.
  double repeat(nb::object x, nb::object weight, nb::object out, int count) {
    const Operand a(x, name(), "x"), b(weight, name(), "weight");
    const Operand c(out, name(), "out");
    return comm_->use(name(), x, [&](Communicator&) {
      const double begin = thread_seconds();
      for (int i = 0; i < count; ++i) op_->run({a.tensor(), b.tensor(), c.tensor()});
      return thread_seconds() - begin;
    });
  }

  std::string strategy() const {
    comm_->open(name());
    return std::string(name_of(op_->chosen().form));
  }
  nb::object receipt() const {
    comm_->open(name());
    return to_dict(op_->receipt());
  }
  /// Name, rows and columns of x, weight and out.
  std::vector<std::tuple<std::string, int64_t, int64_t>> operands() const {
    const OpDesc& d = desc();
    return {{d.x.name, d.x.rows, d.x.columns},
            {d.weight.name, d.weight.rows, d.weight.columns},
            {d.out.name, d.out.rows, d.out.columns}};
  }
  std::shared_ptr<Comm> comm() const { return comm_; }
  DType dtype() const { return shape_.dtype; }
  std::string describe() const {
    return fmt::format("<tandem.{} m {} n {} k {} {}{}>", name(), m(), n(), k(), name_of(dtype()),
                       comm_->closed() ? ", closed" : "");
  }
  int64_t m() const { return shape_.m; }
  int64_t n() const { return shape_.n; }
  int64_t k() const { return shape_.k; }

 private:
  const char* name() const { return row_.name.data(); }  // a literal
  const OpDesc& desc() const {
    comm_->open(name());
    return op_->desc();
  }
  void copy_rows(const Tensor& to, const Tensor& from) const {
    if (from.bytes() == 0) return;
    if (GpuRank* const gpu = comm_->gpu()) return gpu->copy(to.data(), from.data(), from.bytes());
    std::memcpy(to.data(), from.data(), from.bytes());
  }
  nb::object new_out(nb::handle x) const {
    const OperandDesc& out = op_->desc().out;
    const bool names_dtype = row_.gradient || out.dtype != shape_.dtype;
    return new_result(x, std::array{out.rows, out.columns}, name(),
                      names_dtype ? name_of(out.dtype).data() : nullptr,
                      row_.gradient ? Fill::zeros : Fill::none);
  }
  void set_result(const Options& options) {
    shape_.scaling = scaling_from(name(), options.scaling);
    if (!shape_.scaled() && shape_.scaling != Scaling::tensor) {
      throw InvalidArgument(fmt::format("{}: scaling '{}' with dtype {}: expected dtype e4m3",
                                        name(), options.scaling, name_of(shape_.dtype)));
    }
    if (options.out_dtype.is_none()) return;
    shape_.out_dtype = dtype_from(options.out_dtype);
    if (shape_.scaled() || shape_.out_dtype == DType::f32 || shape_.out_dtype == shape_.dtype) {
      return;
    }
    throw InvalidArgument(fmt::format("{}: out_dtype {} with dtype {}: expected {} or f32", name(),
                                      name_of(shape_.out_dtype), name_of(shape_.dtype),
                                      name_of(shape_.dtype)));
  }

  const OperatorRow& row_;
  const std::shared_ptr<Comm> comm_;
  OpDesc shape_;
  OverlapOperator* op_ = nullptr;
};

constexpr const char* kAgGemm =
    "out[M, N] = all-gather(x)[M, K] @ weight[N, K].T + bias[N].\n\n"
    "m: rows over all ranks; n: output features of this rank; k: input features. codec: wire\n"
    "format of x's rows; all ranks use them as decoded. allow_uncompressed: rows are sent\n"
    "uncompressed if that is measured to be faster. keep_gathered: for gathered(). strict: raises\n"
    "Unsupported on all ranks, with the reason, unless what would run overlaps or strategy is\n"
    "'serial'; 'automatic' asks for overlap too, though serial may be faster. out_dtype: 'f32', "
    "or\n"
    "None for the dtype. dtype e4m3 (torch.float8_e4m3fn): out_dtype is bf16 (None), f32 or, on "
    "GPUs,\n"
    "f16; scaling: 'tensor', one scale for x and one for weight, or 'row', one per row of each.\n"
    "x: this rank's rows shard_of(m, size, rank), [rows, K]. Collective to construct and to call.\n"
    "Raises InvalidArgument, Mismatch, Timeout, Aborted.";
constexpr const char* kCallAgGemm =
    "x: [this rank's rows, K]; weight: [N, K] (weight_kn: w.T of a [K, N] w); out: [M, N], of the\n"
    "dtype or f32, written and returned, or None for a new one; bias: [N], if constructed with "
    "one.\n"
    "Rows are dense. e4m3: out is of out_dtype; x_scale and weight_scale, contiguous f32 of any "
    "shape,\n"
    "have one element, x_scale's equal on all ranks, or one per row of x and weight.\n"
    "Raises InvalidArgument naming the operand, Timeout, Aborted.";
constexpr const char* kGathered =
    "A copy of the rows [M, K] of all ranks that the last call gathered, in out or in a new tensor "
    "of\n"
    "the framework and dtype of `like`; local False: without this rank's rows, which the caller "
    "has.\n"
    "Raises InvalidArgument without keep_gathered.";
constexpr const char* kCallGemmRs =
    "x: [M, K]; weight: [N, K] (weight_kn: w.T of a [K, N] w); out: [this rank's rows, N], of the\n"
    "dtype or f32, written and returned, or None for a new one; bias: [N], if constructed with "
    "one.\n"
    "Rows are dense. e4m3: out is of out_dtype; scales: as of AgGemm.\n"
    "Raises InvalidArgument naming the operand, Timeout, Aborted.";
constexpr const char* kCallGemmAr =
    "x: [M, K]; weight: [N, K] (weight_kn: w.T of a [K, N] w); out: [M, N], written and returned, "
    "or\n"
    "None for a new one; bias: [N], if constructed with one. With add_norm: residual [M, N] and "
    "gain\n"
    "[N] of the dtype; returns (out, hidden), hidden = residual + the sum, out = hidden *\n"
    "rsqrt(mean(hidden^2, -1) + eps) * gain; hidden may be residual itself. Rows are dense.\n"
    "e4m3: all but x and weight are of out_dtype; scales: as of AgGemm. Raises\n"
    "InvalidArgument naming the operand, Timeout, Aborted.";
constexpr const char* kCallAgWgrad =
    "x: [this rank's rows, K]; dy: [M, N]; out: f32 [N, K] (weight_kn: dw.T of a [K, N] dw), added "
    "to\n"
    "and returned, or None for a new one. Raises InvalidArgument naming the operand, Timeout, "
    "Aborted.";
constexpr const char* kGemmRs =
    "This rank's rows of the sum over ranks of x[M, K] @ weight[N, K].T, + bias[N].\n\n"
    "k: input features of this rank. out: [rows of shard_of(m, size, rank), N]. codec: wire\n"
    "format of partial products; allow_uncompressed, strict, out_dtype, scaling: as of AgGemm.\n"
    "Collective to construct and to call. Raises InvalidArgument, Mismatch, Timeout, Aborted.";
constexpr const char* kGemmAr =
    "out[M, N] = the sum over ranks of x[M, K] @ weight[N, K].T, + bias[N]: the same bits on "
    "all.\n\n"
    "k: input features of this rank. codec: wire format of partial products and sums;\n"
    "allow_uncompressed, strict, out_dtype, scaling: as of AgGemm, but with other dtypes than "
    "e4m3\n"
    "the result has the dtype. add_norm: calls add the sum to a residual and normalize it.\n"
    "Collective to construct and to call. Raises InvalidArgument, Mismatch, Timeout, Aborted.";
constexpr const char* kAgWgrad =
    "out[N, K] += dy[M, N].T @ all-gather(x)[M, K], in f32: AgGemm's weight gradient.\n\n"
    "x: [rows of shard_of(m, size, rank), K]; without out the result starts from zero. codec,\n"
    "allow_uncompressed, strict: as of AgGemm. Collective to construct and to call. Raises\n"
    "InvalidArgument, Mismatch, Timeout, Aborted.";

/// Documentation of an operator's class and of its call.
struct Text {
  std::string_view op;
  const char *of_class, *of_call;
};
constexpr Text kTexts[] = {{"ag_gemm", kAgGemm, kCallAgGemm},
                           {"gemm_rs", kGemmRs, kCallGemmRs},
                           {"gemm_ar", kGemmAr, kCallGemmAr},
                           {"ag_wgrad", kAgWgrad, kCallAgWgrad}};
Text text_of(const OperatorRow& row) {
  const auto* found = std::ranges::find(kTexts, row.name, &Text::op);
  return found == std::end(kTexts) ? Text{row.name, "", ""} : *found;
}

/// Arguments that all constructors begin with, and options that all have.
struct CommonArguments {
  std::shared_ptr<Comm> comm;
  const Integer &m, &n, &k;
  nb::object dtype;
};

void construct(Operator* self, const OperatorRow& row, const CommonArguments& common,
               const Integer& chunks, Options options) {
  options.chunks = chunks.to<int>(row.name, "chunks");
  new (self) Operator(row, common.comm, common.m.to<int64_t>(row.name, "m"),
                      common.n.to<int64_t>(row.name, "n"), common.k.to<int64_t>(row.name, "k"),
                      common.dtype, options);
}

/// Defines __init__ with the common arguments and `more`.
template <typename Init, typename... More>
void bind_init(const nb::object& scope, const Init& init, const More&... more) {
  nb::cpp_function_def(init, nb::scope(scope), nb::name("__init__"), nb::is_method(),
                       nb::arg("comm"), nb::arg("m"), nb::arg("n"), nb::arg("k"),
                       nb::arg("dtype") = "f32", nb::kw_only(), nb::arg("bias") = false,
                       nb::arg("weight_kn") = false, nb::arg("strategy") = "automatic",
                       nb::arg("chunks") = 0, nb::arg("codec") = nb::none(),
                       nb::arg("allow_uncompressed") = false, nb::arg("strict") = false, more...);
}

void bind_gradient_constructor(const nb::object& scope, const OperatorRow& row) {
  bind_init(scope, [&row](Operator* self, std::shared_ptr<Comm> comm, const Integer& m_,
                          const Integer& n, const Integer& k, nb::object dtype, bool bias,
                          bool weight_kn, std::string strategy, const Integer& chunks,
                          nb::handle codec, bool allow_uncompressed, bool strict) {
    construct(self, row, {std::move(comm), m_, n, k, std::move(dtype)}, chunks,
              {.bias = bias,
               .weight_kn = weight_kn,
               .strategy = std::move(strategy),
               .codec = wire_from(codec),
               .allow_uncompressed = allow_uncompressed,
               .strict = strict});
  });
}

/// `extra`: name of the option specific to this operator.
template <typename... Extra>
void bind_constructor(const nb::object& scope, const OperatorRow& row, const Extra&... extra) {
  bind_init(
      scope,
      [&row](Operator* self, std::shared_ptr<Comm> comm, const Integer& m_, const Integer& n,
             const Integer& k, nb::object dtype, bool bias, bool weight_kn, std::string strategy,
             const Integer& chunks, nb::handle codec, bool allow_uncompressed, bool strict,
             nb::object out_dtype, std::string scaling, same_as_bool<Extra>... with) {
        construct(self, row, {std::move(comm), m_, n, k, std::move(dtype)}, chunks,
                  {.bias = bias,
                   .weight_kn = weight_kn,
                   .strategy = std::move(strategy),
                   .codec = wire_from(codec),
                   .allow_uncompressed = allow_uncompressed,
                   .strict = strict,
                   .extra = (with || ... || false),
                   .out_dtype = std::move(out_dtype),
                   .scaling = std::move(scaling)});
      },
      nb::arg("out_dtype") = nb::none(), nb::arg("scaling") = "tensor",
      (nb::arg(extra) = false)...);
}

/// Class of a row: derives from `base` and has the constructor and the call of this operator.
nb::object class_of(const OperatorRow& row, const nb::object& base) {
  const std::string name(row.class_name);
  const Text text = text_of(row);
  nb::dict members;
  members["__module__"] = "tandem._core";
  members["__doc__"] = text.of_class;
  members["__slots__"] = nb::tuple();
  nb::object made = base.type()(name, nb::make_tuple(base), members);
  if (row.keep_gathered) {
    bind_constructor(made, row, "keep_gathered");
  } else if (row.add_norm) {
    bind_constructor(made, row, "add_norm");
  } else if (row.gradient) {
    bind_gradient_constructor(made, row);
  } else {
    bind_constructor(made, row);
  }
  const auto bind = [&](const char* method, const char* doc, auto call, const auto&... args) {
    nb::cpp_function_def(call, nb::scope(made), nb::name(method), nb::is_method(), args..., doc);
  };
  const auto x = nb::arg("x").none(), weight = nb::arg("weight").none();
  const auto out = nb::arg("out") = nb::none(), bias = nb::arg("bias") = nb::none();
  const auto x_scale = nb::arg("x_scale") = nb::none();
  const auto weight_scale = nb::arg("weight_scale") = nb::none();
  if (row.gradient) {
    bind("__call__", text.of_call, &Operator::gradient, x, nb::arg("dy").none(), out);
  } else if (row.add_norm) {
    bind("__call__", text.of_call, &Operator::product_and_norm, x, weight, out, bias, nb::kw_only(),
         x_scale, weight_scale, nb::arg("residual") = nb::none(), nb::arg("gain") = nb::none(),
         nb::arg("hidden") = nb::none(), nb::arg("eps") = 1e-5);
  } else {
    bind("__call__", text.of_call, &Operator::product, x, weight, out, bias, nb::kw_only(), x_scale,
         weight_scale);
  }
  if (row.keep_gathered) {
    bind("gathered", kGathered, &Operator::gathered, nb::arg("like").none(), out, nb::kw_only(),
         nb::arg("local") = true);
  }
  return made;
}

}  // namespace

Strategy strategy_from(const std::string& name) {
  for (const auto each : {Strategy::automatic, Strategy::serial, Strategy::overlapped}) {
    if (name == name_of(each)) return each;
  }
  throw InvalidArgument(
      fmt::format("strategy '{}': expected automatic, serial or overlapped", name));
}

void bind_operators(nb::module_& m) {
  const auto base = nb::class_<Operator>(m, "_Operator", nb::is_weak_referenceable())
                        .def_prop_ro("m", &Operator::m)
                        .def_prop_ro("n", &Operator::n)
                        .def_prop_ro("k", &Operator::k)
                        .def_prop_ro("dtype", &Operator::dtype)
                        .def_prop_ro("comm", &Operator::comm)
                        .def_prop_ro("strategy", &Operator::strategy,
                                     "What was chosen: 'serial' or 'overlapped'.")
                        .def_prop_ro("receipt", &Operator::receipt,
                                     "What was asked for and what runs: a row of receipts().")
                        .def_prop_ro("_operands", &Operator::operands)
                        .def("_repeat", &Operator::repeat)
                        .def_static("_at", &Operator::at, nb::arg("address"))
                        .def("__deepcopy__", [](nb::object self, nb::handle) { return self; })
                        .def("__repr__", &Operator::describe);
  for (const OperatorRow* row : operators()) {
    m.attr(std::string(row->class_name).c_str()) = class_of(*row, base);
  }
}

}  // namespace tandem::python
