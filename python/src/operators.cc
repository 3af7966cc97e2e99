// Overlap operators, as one class template: they differ in the shapes of inputs and outputs.
#include <fmt/format.h>
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include <array>
#include <cstring>
#include <ctime>
#include <memory>
#include <optional>
#include <utility>

#include "comm.h"
#include "operand.h"
#include "tandem/collectives.h"
#include "tandem/error.h"
#include "tandem/overlap.h"
#include "wire.h"

namespace tandem::python {
namespace {

struct Options {
  bool bias = false, weight_kn = false;
  std::string strategy = "automatic";
  int chunks = 0;
  Wire codec = {};
  bool allow_uncompressed = false;
  bool extra = false;  ///< keep_gathered or add_norm
};

OverlapOptions options_from(const char* op, const Options& options) {
  OverlapOptions how{strategy_from(options.strategy), options.chunks};
  how.wire = options.codec;
  if (options.allow_uncompressed && how.wire.is_none()) {
    throw InvalidArgument(fmt::format("{}: allow_uncompressed without a codec: expected none", op));
  }
  how.allow_uncompressed = options.allow_uncompressed;
  return how;
}

template <typename>
using same_as_bool = bool;

double thread_seconds() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return double(now.tv_sec) + 1e-9 * double(now.tv_nsec);
}

struct AgGemmTraits {
  using Op = AgGemm;
  static constexpr const char* kName = "ag_gemm";
  static int64_t rows(int64_t m, const Comm&) { return m; }
  static void set_extra(Op::Shape& shape, bool extra) { shape.keep_gathered = extra; }
};
struct GemmRsTraits {
  using Op = GemmRs;
  static constexpr const char* kName = "gemm_rs";
  static int64_t rows(int64_t m, const Comm& comm) {
    return shard_of(m, comm.size(), comm.rank()).count;
  }
  static void set_extra(Op::Shape&, bool) {}
};
struct GemmArTraits {
  using Op = GemmAr;
  static constexpr const char* kName = "gemm_ar";
  static int64_t rows(int64_t m, const Comm&) { return m; }
  static void set_extra(Op::Shape& shape, bool extra) { shape.add_norm = extra; }
};
struct AgWgradTraits {
  using Op = AgWgrad;
  static constexpr const char* kName = "ag_wgrad";
  static void set_extra(Op::Shape&, bool) {}
};

template <typename Traits>
class Operator : public Living<Operator<Traits>> {
 public:
  using Op = typename Traits::Op;

  Operator(std::shared_ptr<Comm> comm, int64_t m, int64_t n, int64_t k, nb::handle dtype,
           const Options& options)
      : comm_(std::move(comm)), m_(m), n_(n), k_(k), dtype_(dtype_from(dtype)) {
    typename Op::Shape shape{.m = m, .n = n, .k = k, .dtype = dtype_};
    shape.bias = options.bias;
    shape.weight_kn = options.weight_kn;
    Traits::set_extra(shape, options.extra);
    const OverlapOptions how = options_from(Traits::kName, options);
    comm_->refuse_capture(Traits::kName);
    std::unique_ptr<Op> op = comm_->use(
        Traits::kName, [&](Communicator& c) { return std::make_unique<Op>(c, shape, how); });
    op_ = comm_->adopt(std::move(op));
  }
  Operator(const Operator&) = delete;
  ~Operator() { comm_->drop(op_); }

  nb::object product(nb::object x, nb::object weight, nb::object out, nb::object bias) {
    comm_->open(Traits::kName);
    const Operand a(x, Traits::kName, "x"), b(weight, Traits::kName, "weight");
    std::optional<Operand> added;
    if (!bias.is_none()) added.emplace(bias, Traits::kName, "bias");
    const bool fresh = out.is_none();
    if (fresh) out = new_result(x, std::array{Traits::rows(m_, *comm_), n_}, Traits::kName);
    const Operand c(out, Traits::kName, "out");
    comm_->use(Traits::kName, x, [&](Communicator&) {
      op_->run(a.tensor(), b.tensor(), c.tensor(), added ? &added->tensor() : nullptr);
    });
    return written(x, std::move(out), fresh);
  }

  /// GemmAr with residual and RMSNorm: (out, hidden).
  nb::object product_and_norm(nb::object x, nb::object weight, nb::object out, nb::object bias,
                              nb::object residual, nb::object gain, nb::object hidden, double eps) {
    if (residual.is_none() && gain.is_none() && hidden.is_none()) {
      return product(std::move(x), std::move(weight), std::move(out), std::move(bias));
    }
    comm_->open(Traits::kName);
    const Operand a(x, Traits::kName, "x"), b(weight, Traits::kName, "weight");
    const Operand stream(residual, Traits::kName, "residual"), by(gain, Traits::kName, "gain");
    std::optional<Operand> added;
    if (!bias.is_none()) added.emplace(bias, Traits::kName, "bias");
    const bool fresh_out = out.is_none(), fresh_hidden = hidden.is_none();
    if (fresh_out) out = new_result(x, std::array{m_, n_}, Traits::kName);
    if (fresh_hidden) hidden = new_result(x, std::array{m_, n_}, Traits::kName);
    {
      const Operand c(out, Traits::kName, "out"), to(hidden, Traits::kName, "hidden");
      const AddNorm norm{stream.tensor(), by.tensor(), to.tensor(), float(eps)};
      comm_->use(Traits::kName, x, [&](Communicator&) {
        op_->run(a.tensor(), b.tensor(), c.tensor(), added ? &added->tensor() : nullptr, nullptr,
                 &norm);
      });
    }
    return nb::make_tuple(written(x, std::move(out), fresh_out),
                          written(x, std::move(hidden), fresh_hidden));
  }

  /// Copy of the gather that AgGemm saves, since that ends with the operator.
  nb::object gathered(nb::object like, nb::object out) {
    comm_->open(Traits::kName);
    const Tensor whole = op_->gathered();
    const bool fresh = out.is_none();
    if (fresh) out = new_result(like, std::array{m_, k_}, Traits::kName);
    {
      const Operand to(out, Traits::kName, "out");
      const Tensor& t = to.tensor();
      if (t.describe() != whole.describe() || !t.contiguous() || t.read_only() ||
          t.device() != whole.device()) {
        throw InvalidArgument(fmt::format("{}: gathered: out: {}: expected contiguous, writable {}",
                                          Traits::kName, t.describe(), whole.describe()));
      }
      if (GpuRank* const gpu = comm_->gpu()) {
        comm_->use(Traits::kName, like,
                   [&](Communicator&) { gpu->copy(t.data(), whole.data(), whole.bytes()); });
      } else if (whole.bytes() > 0) {
        std::memcpy(t.data(), whole.data(), whole.bytes());
      }
    }
    return written(like, std::move(out), fresh);
  }

  nb::object gradient(nb::object x, nb::object dy, nb::object out) {
    comm_->open(Traits::kName);
    const Operand a(x, Traits::kName, "x"), b(dy, Traits::kName, "dy");
    const bool fresh = out.is_none();
    if (fresh) out = new_result(x, std::array{n_, k_}, Traits::kName, "f32");
    const Operand c(out, Traits::kName, "out");
    comm_->use(Traits::kName, x,
               [&](Communicator&) { op_->run(a.tensor(), b.tensor(), c.tensor()); });
    return written(x, std::move(out), fresh);
  }

  /// CPU seconds of `count` calls made from C++; the rest of a Python call's time is binding
  /// overhead.
  double repeat(nb::object x, nb::object weight, nb::object out, int count) {
    const Operand a(x, Traits::kName, "x"), b(weight, Traits::kName, "weight");
    const Operand c(out, Traits::kName, "out");
    return comm_->use(Traits::kName, x, [&](Communicator&) {
      const double begin = thread_seconds();
      for (int i = 0; i < count; ++i) op_->run(a.tensor(), b.tensor(), c.tensor());
      return thread_seconds() - begin;
    });
  }

  std::string strategy() const {
    comm_->open(Traits::kName);
    return std::string(name_of(op_->strategy()));
  }
  std::shared_ptr<Comm> comm() const { return comm_; }
  DType dtype() const { return dtype_; }
  std::string describe() const {
    return fmt::format("<tandem.{} m {} n {} k {} {}{}>", Traits::kName, m_, n_, k_,
                       name_of(dtype_), comm_->closed() ? ", closed" : "");
  }
  int64_t m() const { return m_; }
  int64_t n() const { return n_; }
  int64_t k() const { return k_; }

 private:
  const std::shared_ptr<Comm> comm_;
  const int64_t m_, n_, k_;
  const DType dtype_;
  Op* op_ = nullptr;
};

/// `extra`: name of the option specific to this operator.
template <typename Traits, typename... Extra>
nb::class_<Operator<Traits>> bind_common(nb::module_& m, const char* name, const char* doc,
                                         const Extra&... extra) {
  using O = Operator<Traits>;
  return nb::class_<O>(m, name, doc)
      .def(
          "__init__",
          [](O* self, std::shared_ptr<Comm> comm, int64_t m_, int64_t n, int64_t k,
             nb::object dtype, bool bias, bool weight_kn, std::string strategy, int chunks,
             nb::handle codec, bool allow_uncompressed, same_as_bool<Extra>... with) {
            new (self) O(std::move(comm), m_, n, k, dtype,
                         {bias, weight_kn, std::move(strategy), chunks, wire_from(codec),
                          allow_uncompressed, (with || ... || false)});
          },
          nb::arg("comm"), nb::arg("m"), nb::arg("n"), nb::arg("k"), nb::arg("dtype") = "f32",
          nb::kw_only(), nb::arg("bias") = false, nb::arg("weight_kn") = false,
          nb::arg("strategy") = "automatic", nb::arg("chunks") = 0, nb::arg("codec") = nb::none(),
          nb::arg("allow_uncompressed") = false, (nb::arg(extra) = false)...)
      .def_prop_ro("m", &O::m)
      .def_prop_ro("n", &O::n)
      .def_prop_ro("k", &O::k)
      .def_prop_ro("dtype", &O::dtype)
      .def_prop_ro("comm", &O::comm)
      .def_prop_ro("strategy", &O::strategy, "What was chosen: 'serial' or 'overlapped'.")
      .def("_repeat", &O::repeat)
      .def_static("_at", &O::at, nb::arg("address"))
      .def("__deepcopy__", [](nb::object self, nb::handle) { return self; })
      .def("__repr__", &O::describe);
}

constexpr const char* kAgGemm =
    "out[M, N] = all-gather(x)[M, K] @ weight[N, K].T + bias[N].\n\n"
    "m: rows over all ranks; n: output features of this rank; k: input features. codec: wire\n"
    "format of x's rows; all ranks use them as decoded. allow_uncompressed: rows are sent\n"
    "uncompressed if that is measured to be faster. keep_gathered: for gathered().\n"
    "x: this rank's rows shard_of(m, size, rank), [rows, K]. Collective to construct and to call.\n"
    "Raises InvalidArgument, Mismatch, Timeout, Aborted.";
constexpr const char* kCallAgGemm =
    "x: [this rank's rows, K]; weight: [N, K] (weight_kn: w.T of a [K, N] w); out: [M, N], of the\n"
    "dtype or f32, written and returned, or None for a new one; bias: [N], if constructed with "
    "one.\n"
    "Rows are dense. Raises InvalidArgument naming the operand, Timeout, Aborted.";
constexpr const char* kGathered =
    "A copy of the rows [M, K] of all ranks that the last call gathered, in out or in a new tensor "
    "of\n"
    "the framework and dtype of `like`. Raises InvalidArgument without keep_gathered.";
constexpr const char* kCallGemmRs =
    "x: [M, K]; weight: [N, K] (weight_kn: w.T of a [K, N] w); out: [this rank's rows, N], of the\n"
    "dtype or f32, written and returned, or None for a new one; bias: [N], if constructed with "
    "one.\n"
    "Rows are dense. Raises InvalidArgument naming the operand, Timeout, Aborted.";
constexpr const char* kCallGemmAr =
    "x: [M, K]; weight: [N, K] (weight_kn: w.T of a [K, N] w); out: [M, N], written and returned, "
    "or\n"
    "None for a new one; bias: [N], if constructed with one. With add_norm: residual [M, N] and "
    "gain\n"
    "[N] of the dtype; returns (out, hidden), hidden = residual + the sum, out = hidden *\n"
    "rsqrt(mean(hidden^2, -1) + eps) * gain; hidden may be residual itself. Rows are dense. "
    "Raises\n"
    "InvalidArgument naming the operand, Timeout, Aborted.";
constexpr const char* kCallAgWgrad =
    "x: [this rank's rows, K]; dy: [M, N]; out: f32 [N, K] (weight_kn: dw.T of a [K, N] dw), added "
    "to\n"
    "and returned, or None for a new one. Raises InvalidArgument naming the operand, Timeout, "
    "Aborted.";
constexpr const char* kGemmRs =
    "This rank's rows of the sum over ranks of x[M, K] @ weight[N, K].T, + bias[N].\n\n"
    "k: input features of this rank. out: [rows of shard_of(m, size, rank), N]. codec: wire\n"
    "format of partial products; allow_uncompressed: as of AgGemm. Collective to construct and to\n"
    "call. Raises InvalidArgument, Mismatch, Timeout, Aborted.";
constexpr const char* kGemmAr =
    "out[M, N] = the sum over ranks of x[M, K] @ weight[N, K].T, + bias[N]: the same bits on "
    "all.\n\n"
    "k: input features of this rank. codec: wire format of partial products and sums;\n"
    "allow_uncompressed: as of AgGemm. add_norm: calls add the sum to a residual and normalize\n"
    "it. Collective to construct and to call. Raises InvalidArgument, Mismatch, Timeout, Aborted.";
constexpr const char* kAgWgrad =
    "out[N, K] += dy[M, N].T @ all-gather(x)[M, K], in f32: AgGemm's weight gradient.\n\n"
    "x: [rows of shard_of(m, size, rank), K]; without out the result starts from zero. codec,\n"
    "allow_uncompressed: as of AgGemm. Collective to construct and to call. Raises\n"
    "InvalidArgument, Mismatch, Timeout, Aborted.";

}  // namespace

Strategy strategy_from(const std::string& name) {
  for (const auto each : {Strategy::automatic, Strategy::serial, Strategy::overlapped}) {
    if (name == name_of(each)) return each;
  }
  throw InvalidArgument(
      fmt::format("strategy '{}': expected automatic, serial or overlapped", name));
}

void bind_operators(nb::module_& m) {
  bind_common<AgGemmTraits>(m, "AgGemm", kAgGemm, "keep_gathered")
      .def("__call__", &Operator<AgGemmTraits>::product, nb::arg("x").none(),
           nb::arg("weight").none(), nb::arg("out") = nb::none(), nb::arg("bias") = nb::none(),
           kCallAgGemm)
      .def("gathered", &Operator<AgGemmTraits>::gathered, nb::arg("like").none(),
           nb::arg("out") = nb::none(), kGathered);
  bind_common<GemmRsTraits>(m, "GemmRs", kGemmRs)
      .def("__call__", &Operator<GemmRsTraits>::product, nb::arg("x").none(),
           nb::arg("weight").none(), nb::arg("out") = nb::none(), nb::arg("bias") = nb::none(),
           kCallGemmRs);
  bind_common<GemmArTraits>(m, "GemmAr", kGemmAr, "add_norm")
      .def("__call__", &Operator<GemmArTraits>::product_and_norm, nb::arg("x").none(),
           nb::arg("weight").none(), nb::arg("out") = nb::none(), nb::arg("bias") = nb::none(),
           nb::kw_only(), nb::arg("residual") = nb::none(), nb::arg("gain") = nb::none(),
           nb::arg("hidden") = nb::none(), nb::arg("eps") = 1e-5, kCallGemmAr);
  bind_common<AgWgradTraits>(m, "AgWgrad", kAgWgrad)
      .def("__call__", &Operator<AgWgradTraits>::gradient, nb::arg("x").none(),
           nb::arg("dy").none(), nb::arg("out") = nb::none(), kCallAgWgrad);
}

}  // namespace tandem::python
