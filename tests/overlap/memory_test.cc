// Memory of operands: every output against every other operand of every operator, overlapping
// entirely, by one element, by one byte, and adjacent; read-only operands; views of wider matrices.
#include <fmt/format.h>
#include <gmock/gmock.h>

#include <map>
#include <string>
#include <vector>

#include "gemm/gemm.h"
#include "tandem/overlap.h"
#include "tests/comm/ranks.h"
#include "tests/error_of.h"
#include "tests/overlap/problem.h"

namespace tandem::test {
namespace {

using testing::HasSubstr;
using Tensors = std::map<std::string, Tensor>;

class OperandMemory : public OnRanks {};

constexpr int64_t kM = 13, kN = 6, kK = 4;
constexpr size_t kSlot = 4096;  // far more than an operand

// An operator under test: its operands, of which `outputs` are written, each in a separate slot.
struct Subject {
  std::string op;
  std::vector<std::pair<std::string, std::vector<int64_t>>> shapes;
  std::vector<std::string> outputs;
  std::function<void(const Tensors&)> run;

  Tensors in(const Memory& arena) const {
    Tensors all;
    for (size_t i = 0; i < shapes.size(); ++i) {
      all[shapes[i].first] =
          Tensor(arena.data() + (i + 1) * kSlot, DType::f32, std::span(shapes[i].second));
    }
    return all;
  }
  size_t bytes() const { return (shapes.size() + 2) * kSlot; }
};

std::vector<Subject> subjects(Communicator& comm, Strategy strategy) {
  const int64_t local_rows = shard_of(kM, comm.size(), comm.rank()).count;
  const OverlapOptions options{strategy, 0};
  std::vector<Subject> all;
  all.push_back(
      {"ag_gemm",
       {{"x", {local_rows, kK}}, {"weight", {kN, kK}}, {"out", {kM, kN}}, {"bias", {kN}}},
       {"out"},
       [op = std::make_shared<AgGemm>(comm, AgGemm::Shape{.m = kM, .n = kN, .k = kK, .bias = true},
                                      options)](const Tensors& t) {
         op->run(t.at("x"), t.at("weight"), t.at("out"), &t.at("bias"));
       }});
  all.push_back(
      {"gemm_rs",
       {{"x", {kM, kK}}, {"weight", {kN, kK}}, {"out", {local_rows, kN}}, {"bias", {kN}}},
       {"out"},
       [op = std::make_shared<GemmRs>(comm, GemmRs::Shape{.m = kM, .n = kN, .k = kK, .bias = true},
                                      options)](const Tensors& t) {
         op->run(t.at("x"), t.at("weight"), t.at("out"), &t.at("bias"));
       }});
  all.push_back(
      {"gemm_ar",
       {{"x", {kM, kK}},
        {"weight", {kN, kK}},
        {"out", {kM, kN}},
        {"bias", {kN}},
        {"residual", {kM, kN}},
        {"gain", {kN}},
        {"hidden", {kM, kN}}},
       {"out", "hidden"},
       [op = std::make_shared<GemmAr>(
            comm, GemmAr::Shape{.m = kM, .n = kN, .k = kK, .bias = true, .add_norm = true},
            options)](const Tensors& t) {
         const AddNorm tail{t.at("residual"), t.at("gain"), t.at("hidden")};
         op->run(t.at("x"), t.at("weight"), t.at("out"), &t.at("bias"), nullptr, &tail);
       }});
  all.push_back(
      {"ag_wgrad",
       {{"x", {local_rows, kK}}, {"dy", {kM, kN}}, {"dw", {kN, kK}}},
       {"dw"},
       [op = std::make_shared<AgWgrad>(comm, AgWgrad::Shape{.m = kM, .n = kN, .k = kK}, options)](
           const Tensors& t) { op->run(t.at("x"), t.at("dy"), t.at("dw")); }});
  return all;
}

constexpr Strategy kStrategies[] = {Strategy::serial, Strategy::overlapped};

TEST_P(OperandMemory, OverlappingOutputsAreRefused) {
  run([](Communicator& comm) {
    set_kernel_threads(1);
    for (const Strategy strategy : kStrategies) {
      for (const Subject& subject : subjects(comm, strategy)) {
        const Memory arena(subject.bytes());
        for (const std::string& output : subject.outputs) {
          for (const auto& [name, shape] : subject.shapes) {
            if (name == output) continue;
            const Tensors apart = subject.in(arena);
            const Tensor& written = apart.at(output);
            const auto error_at = [&](const std::byte* at) {
              Tensors all = apart;
              all[name] = Tensor(const_cast<std::byte*>(at), DType::f32, std::span(shape));
              return error_of<InvalidArgument>([&] { subject.run(all); });
            };
            const auto* begin = written.as<std::byte>();
            const auto* end = begin + written.bytes();
            const size_t bytes = apart.at(name).bytes();
            SCOPED_TRACE(fmt::format("{} {} {}: {} and {}", subject.op, name_of(strategy),
                                     comm.size(), output, name));
            const auto expect_refused = [&](const std::byte* at) {
              const std::string message = error_at(at);
              const auto range = [](const void* from, size_t size) {
                const auto first = reinterpret_cast<uintptr_t>(from);
                return fmt::format("[{:#x}, {:#x})", first, first + size);
              };
              EXPECT_THAT(message, HasSubstr(subject.op + ": "));
              EXPECT_THAT(message, HasSubstr(output + " f32["));
              EXPECT_THAT(message, HasSubstr(name + " f32["));
              EXPECT_THAT(message, HasSubstr(range(begin, written.bytes())));
              EXPECT_THAT(message, HasSubstr(range(at, bytes)));
            };
            if (output == "hidden" && name == "residual") {
              EXPECT_EQ(error_at(begin), "");
              expect_refused(begin + 4);
            } else if (written.bytes() && bytes) {
              expect_refused(begin);
            }
            if (written.bytes() && bytes) {
              expect_refused(end - 4);
              expect_refused(end - 1);
              expect_refused(begin - bytes + 4);
              expect_refused(begin - bytes + 1);
            }
            EXPECT_EQ(error_at(end), "");
            EXPECT_EQ(error_at(begin - bytes), "");
          }
        }
      }
    }
  });
}

TEST_P(OperandMemory, InputsMayOverlapAndBeReadOnly) {
  run([](Communicator& comm) {
    set_kernel_threads(1);
    for (const Strategy strategy : kStrategies) {
      for (const Subject& subject : subjects(comm, strategy)) {
        SCOPED_TRACE(fmt::format("{} {}", subject.op, name_of(strategy)));
        const Memory arena(subject.bytes());
        const Tensors apart = subject.in(arena);
        Tensors together = apart;
        for (const auto& [name, shape] : subject.shapes) {
          const bool written = std::ranges::count(subject.outputs, name);
          if (!written) {
            together[name] =
                Tensor(static_cast<const std::byte*>(arena.data()), DType::f32, std::span(shape));
            continue;
          }
          Tensors constant = apart;
          constant[name] = apart.at(name).as_read_only();
          EXPECT_EQ(error_of<InvalidArgument>([&] { subject.run(constant); }),
                    fmt::format("{}: {} {} is read-only: expected memory to write to", subject.op,
                                name, apart.at(name).describe()));
        }
        subject.run(together);
      }
    }
  });
}

// Operands without elements share no memory.
TEST_P(OperandMemory, EmptyOperandsOverlapNothing) {
  run([](Communicator& comm) {
    set_kernel_threads(1);
    const Memory memory(kSlot);
    const Tensor out = memory.view(DType::f32, {kM, kN}), x = memory.view(DType::f32, {kM, 0}, 8),
                 weight = memory.view(DType::f32, {kN, 0}, 8);
    GemmAr(comm, {kM, kN, 0}, {Strategy::overlapped, 0}).run(x, weight, out);
    EXPECT_THAT(bytes_of(out), testing::Each(std::byte{0}));
  });
}

TEST_P(OperandMemory, ViewsOfWiderMatricesWorkOrAreRefusedByTheirStrides) {
  run([](Communicator& comm) {
    set_kernel_threads(1);
    const Shard local = shard_of(kM, comm.size(), comm.rank());
    for (const DType dtype : {DType::f32, DType::bf16}) {
      for (const Strategy strategy : kStrategies) {
        // Columns from 3 on of matrices of 11.
        const Matrix wide_x(dtype, kM, 11, 1), wide_w(dtype, kN, 11, 2), wide_out(dtype, kM, 11, 3);
        const Tensor x = wide_x.tensor().narrow(1, 3, kK), w = wide_w.tensor().narrow(1, 3, kK),
                     out = wide_out.tensor().narrow(1, 3, kN);
        const auto before = bytes_of(wide_out.tensor());
        const Matrix dense_x(dtype, kM, kK, 0), dense_w(dtype, kN, kK, 0),
            dense_out(dtype, kM, kN, 0);
        const auto copy = [](const Tensor& from, const Tensor& to) {
          const auto bytes = bytes_of(from);
          std::memcpy(to.data(), bytes.data(), bytes.size());
        };
        copy(x, dense_x.tensor());
        copy(w, dense_w.tensor());
        AgGemm ag(comm, {kM, kN, kK, dtype}, {strategy, 0});
        ag.run(x.rows(local.begin, local.count), w, out);
        ag.run(dense_x.tensor().rows(local.begin, local.count), dense_w.tensor(),
               dense_out.tensor());
        EXPECT_EQ(bytes_of(out), bytes_of(dense_out.tensor()));
        const auto after = bytes_of(wide_out.tensor());
        for (size_t i = 0; i < after.size(); ++i) {  // columns outside the view stay untouched
          const size_t column = i / size_of(dtype) % 11;
          const bool between = column < 3 || column >= 3 + kN;
          ASSERT_TRUE(!between || after[i] == before[i]) << i;
        }
        GemmRs rs(comm, {kM, kN, kK, dtype}, {strategy, 0});
        GemmAr ar(comm, {kM, kN, kK, dtype}, {strategy, 0});
        rs.run(x, w, out.rows(local.begin, local.count));
        rs.run(dense_x.tensor(), dense_w.tensor(),
               dense_out.tensor().rows(local.begin, local.count));
        EXPECT_EQ(bytes_of(out.rows(local.begin, local.count)),
                  bytes_of(dense_out.tensor().rows(local.begin, local.count)));
        ar.run(x, w, out);
        ar.run(dense_x.tensor(), dense_w.tensor(), dense_out.tensor());
        EXPECT_EQ(bytes_of(out), bytes_of(dense_out.tensor()));
        const Matrix wide_dw(DType::f32, kN, 11, 5), dense_dw(DType::f32, kN, kK, 0);
        const Tensor dw = wide_dw.tensor().narrow(1, 3, kK);
        copy(dw, dense_dw.tensor());
        AgWgrad wgrad(comm, {kM, kN, kK, dtype}, {strategy, 0});
        wgrad.run(x.rows(local.begin, local.count), out, dw);
        wgrad.run(dense_x.tensor().rows(local.begin, local.count), dense_out.tensor(),
                  dense_dw.tensor());
        EXPECT_EQ(bytes_of(dw), bytes_of(dense_dw.tensor()));

        // Neither rows nor, for the weight, columns are dense.
        std::vector<std::byte> memory(4 * 64 * 64);
        const auto strided = [&](int64_t rows, int64_t columns, int64_t a, int64_t b) {
          return Tensor(memory.data(), dtype, {rows, columns}, {a, b});
        };
        const std::string name(name_of(dtype));
        EXPECT_EQ(error_of<InvalidArgument>([&] { ar.run(strided(kM, kK, 1, kM), w, out); }),
                  fmt::format("gemm_ar: x is {}[13, 4] with strides 1, 13: expected dense rows "
                              "(stride 1 in the last dimension)",
                              name));
        EXPECT_THAT(error_of<InvalidArgument>([&] { ar.run(x, w, strided(kM, kN, 16, 2)); }),
                    HasSubstr("with strides 16, 2: expected dense rows"));
        EXPECT_THAT(error_of<InvalidArgument>([&] { ar.run(x, w, strided(kM, kN, 5, 1)); }),
                    HasSubstr("with strides 5, 1: expected dense rows"));
        EXPECT_THAT(error_of<InvalidArgument>([&] { ar.run(x, strided(kN, kK, 16, 2), out); }),
                    HasSubstr("weight is " + name + "[6, 4] with strides 16, 2: expected dense"));
        EXPECT_THAT(error_of<InvalidArgument>([&] { ar.run(x, strided(kN, kK, 1, 0), out); }),
                    HasSubstr("with strides 1, 0: expected dense rows or columns"));
        EXPECT_THAT(error_of<InvalidArgument>([&] { ar.run(x, strided(kN, kK, 0, 1), out); }),
                    HasSubstr("with strides 0, 1: expected dense rows or columns"));
      }
    }
  });
}

TANDEM_INSTANTIATE(OperandMemory);

}  // namespace
}  // namespace tandem::test
