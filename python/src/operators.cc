// The overlap operators. One class template: they differ in the shapes of what goes in and out.
#include <fmt/format.h>
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include <array>
#include <ctime>
#include <memory>
#include <optional>
#include <utility>

#include "comm.h"
#include "operand.h"
#include "tandem/collectives.h"
#include "tandem/error.h"
#include "tandem/overlap.h"

namespace tandem::python {
namespace {

struct Options {
  bool bias = false, weight_kn = false;
  std::string strategy = "automatic";
  int chunks = 0;
  std::optional<std::string> codec = {};
  bool or_plain = false;
};

OverlapOptions options_from(const char* op, const Options& options) {
  OverlapOptions how{strategy_from(options.strategy), options.chunks};
  if (options.codec) how.wire = Wire::parse(*options.codec);
  if (options.or_plain && how.wire.is_none()) {
    throw InvalidArgument(fmt::format("{}: or_plain without a codec: expected none", op));
  }
  how.or_plain = options.or_plain;
  return how;
}

double thread_seconds() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return double(now.tv_sec) + 1e-9 * double(now.tv_nsec);
}

struct AgGemmTraits {
  using Op = AgGemm;
  static constexpr const char* kName = "ag_gemm";
  static int64_t rows(int64_t m, const Comm&) { return m; }
};
struct GemmRsTraits {
  using Op = GemmRs;
  static constexpr const char* kName = "gemm_rs";
  static int64_t rows(int64_t m, const Comm& comm) {
    return shard_of(m, comm.size(), comm.rank()).count;
  }
};
struct GemmArTraits {
  using Op = GemmAr;
  static constexpr const char* kName = "gemm_ar";
  static int64_t rows(int64_t m, const Comm&) { return m; }
};
struct AgWgradTraits {
  using Op = AgWgrad;
  static constexpr const char* kName = "ag_wgrad";
};

template <typename Traits>
class Operator {
 public:
  using Op = typename Traits::Op;

  Operator(std::shared_ptr<Comm> comm, int64_t m, int64_t n, int64_t k, nb::handle dtype,
           const Options& options)
      : comm_(std::move(comm)), m_(m), n_(n), k_(k), dtype_(dtype_from(dtype)) {
    typename Op::Shape shape{.m = m, .n = n, .k = k, .dtype = dtype_};
    shape.bias = options.bias;
    shape.weight_kn = options.weight_kn;
    const OverlapOptions how = options_from(Traits::kName, options);
    std::unique_ptr<Op> op = comm_->use(
        Traits::kName, [&](Communicator& c) { return std::make_unique<Op>(c, shape, how); });
    op_ = comm_->own(std::move(op));
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
    comm_->use(Traits::kName, [&](Communicator&) {
      op_->run(a.tensor(), b.tensor(), c.tensor(), added ? &added->tensor() : nullptr);
    });
    return fresh ? finished(x, std::move(out)) : out;
  }

  nb::object gradient(nb::object x, nb::object dy, nb::object out) {
    comm_->open(Traits::kName);
    const Operand a(x, Traits::kName, "x"), b(dy, Traits::kName, "dy");
    const bool fresh = out.is_none();
    if (fresh) out = new_result(x, std::array{n_, k_}, Traits::kName, "f32");
    const Operand c(out, Traits::kName, "out");
    comm_->use(Traits::kName, [&](Communicator&) { op_->run(a.tensor(), b.tensor(), c.tensor()); });
    return fresh ? finished(x, std::move(out)) : out;
  }

  /// Seconds of processor time of `count` calls that do not come from Python: what one costs there
  /// is the rest.
  double repeat(nb::object x, nb::object weight, nb::object out, int count) {
    const Operand a(x, Traits::kName, "x"), b(weight, Traits::kName, "weight");
    const Operand c(out, Traits::kName, "out");
    return comm_->use(Traits::kName, [&](Communicator&) {
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

template <typename Traits>
nb::class_<Operator<Traits>> bind_common(nb::module_& m, const char* name, const char* doc) {
  using O = Operator<Traits>;
  return nb::class_<O>(m, name, doc)
      .def(
          "__init__",
          [](O* self, std::shared_ptr<Comm> comm, int64_t m_, int64_t n, int64_t k,
             nb::object dtype, bool bias, bool weight_kn, std::string strategy, int chunks,
             std::optional<std::string> codec, bool or_plain) {
            new (self)
                O(std::move(comm), m_, n, k, dtype,
                  {bias, weight_kn, std::move(strategy), chunks, std::move(codec), or_plain});
          },
          nb::arg("comm"), nb::arg("m"), nb::arg("n"), nb::arg("k"), nb::arg("dtype") = "f32",
          nb::kw_only(), nb::arg("bias") = false, nb::arg("weight_kn") = false,
          nb::arg("strategy") = "automatic", nb::arg("chunks") = 0, nb::arg("codec") = nb::none(),
          nb::arg("or_plain") = false)
      .def_prop_ro("m", &O::m)
      .def_prop_ro("n", &O::n)
      .def_prop_ro("k", &O::k)
      .def_prop_ro("dtype", &O::dtype)
      .def_prop_ro("comm", &O::comm)
      .def_prop_ro("strategy", &O::strategy, "What was chosen: 'serial' or 'overlapped'.")
      .def("_repeat", &O::repeat)
      .def("__repr__", &O::describe);
}

template <typename Traits>
auto bind_product(nb::module_& m, const char* name, const char* doc) {
  using O = Operator<Traits>;
  return bind_common<Traits>(m, name, doc)
      .def("__call__", &O::product, nb::arg("x").none(), nb::arg("weight").none(),
           nb::arg("out") = nb::none(), nb::arg("bias") = nb::none());
}

constexpr const char* kAgGemm =
    "out[M, N] = all-gather(x)[M, K] @ weight[N, K].T + bias[N].\n\n"
    "m: rows over all ranks; n: output features of this rank; k: input features. codec: a wire\n"
    "format that x's rows travel in; all ranks use them as decoded. or_plain: where plain rows "
    "are\n"
    "measured to be faster, they travel.\n"
    "x: this rank's rows shard_of(m, size, rank), [rows, K]. Collective to construct and to call.\n"
    "Raises InvalidArgument, Mismatch, Timeout, Aborted.";
constexpr const char* kGemmRs =
    "This rank's rows of the sum over ranks of x[M, K] @ weight[N, K].T, + bias[N].\n\n"
    "k: input features of this rank. out: [rows of shard_of(m, size, rank), N]. codec: a wire\n"
    "format that partial products travel in; or_plain: or as they are. Collective to construct\n"
    "and to call. Raises InvalidArgument, Mismatch, Timeout, Aborted.";
constexpr const char* kGemmAr =
    "out[M, N] = the sum over ranks of x[M, K] @ weight[N, K].T, + bias[N]: the same bits on "
    "all.\n\n"
    "k: input features of this rank. codec: a wire format that partial products and sums travel\n"
    "in; or_plain: or as they are. Collective to construct and to call. Raises\n"
    "InvalidArgument, Mismatch, Timeout, Aborted.";
constexpr const char* kAgWgrad =
    "out[N, K] += dy[M, N].T @ all-gather(x)[M, K], in f32: AgGemm's weight gradient.\n\n"
    "x: [rows of shard_of(m, size, rank), K]; without out the result starts from zero. codec,\n"
    "or_plain: as of AgGemm. Collective to construct and to call. Raises InvalidArgument, "
    "Mismatch, Timeout, Aborted.";

}  // namespace

Strategy strategy_from(const std::string& name) {
  for (const auto each : {Strategy::automatic, Strategy::serial, Strategy::overlapped}) {
    if (name == name_of(each)) return each;
  }
  throw InvalidArgument(
      fmt::format("strategy '{}': expected automatic, serial or overlapped", name));
}

void bind_operators(nb::module_& m) {
  bind_product<AgGemmTraits>(m, "AgGemm", kAgGemm);
  bind_product<GemmRsTraits>(m, "GemmRs", kGemmRs);
  bind_product<GemmArTraits>(m, "GemmAr", kGemmAr);
  bind_common<AgWgradTraits>(m, "AgWgrad", kAgWgrad)
      .def("__call__", &Operator<AgWgradTraits>::gradient, nb::arg("x").none(),
           nb::arg("dy").none(), nb::arg("out") = nb::none());
}

}  // namespace tandem::python
