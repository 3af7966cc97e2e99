#include "bench/bench_options.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <map>
#include <numeric>
#include <string_view>
#include <tuple>

#include "bench/bench_moe.h"
#include "bench/engine/bench_prefill.h"
#include "comm/rendezvous/launch.h"
#include "core/system/machine.h"
#include "core/version.h"
#include "tandem/cuda.h"

namespace tandem {

namespace {

void declare_ranks(CLI::App& command, BenchOptions& options) {
  command.option_defaults()->group("Ranks and links");
  command
      .add_option("--ranks", options.ranks,
                  "Number of ranks: threads, or GPUs (default: all GPUs; a launcher's number)")
      ->check(CLI::Range(1, 4096));
  command
      .add_option("--ranks-per-gpu", options.ranks_per_gpu,
                  "Run N ranks on the first GPU; their times are no results")
      ->capture_default_str()
      ->check(CLI::Range(1, 16));
  command
      .add_option("--transport", options.transport,
                  "Transport between ranks; with nccl they are GPUs (default: mpi under mpirun, "
                  "processes under torchrun and srun, nccl if there is a GPU for each of at least "
                  "two ranks and GPUs time the operator, else threads)")
      ->check(CLI::IsMember({"threads", "mpi", "processes", "nccl"}));
  command.add_option(
      "--link", options.link,
      "Emulate this link between thread ranks, or with --ranks-per-gpu (1GB/s,20us)");
  command.add_option("--link-label", options.link_label,
                     "Name of the real link in the result, such as \"tbf 1gbit\"");
}

void declare_shapes(CLI::App& command, BenchOptions& options) {
  command.option_defaults()->group("Shapes and types");
  const CLI::Range extent(int64_t{1}, int64_t{1} << 40);
  auto* m =
      command.add_option("--m,--tokens", options.m, "Tokens over all ranks; several: one run each");
  auto* n = command.add_option("--n", options.n, "Output features over all ranks");
  auto* k = command.add_option("--k", options.k, "Input features over all ranks, of a GEMM");
  for (CLI::Option* size : {m, n, k}) size->default_str("1024")->check(extent);
  command.add_option("--shapes", options.shapes, "Time these shapes in place of --m, --n and --k")
      ->option_text("MxNxK ...")
      ->excludes(m)
      ->excludes(n)
      ->excludes(k);
  command
      .add_option("--bytes", options.bytes,
                  "Time a collective of these sizes, in place of --m and --n: 16K:256M (times 4 "
                  "each), 1M:64M:x2")
      ->option_text("FIRST:LAST[:xN]")
      ->excludes(m)
      ->excludes(n)
      ->excludes("--shapes");
  command.add_option("--layers", options.layers, "Layers of prefill, of MLP width n and hidden k")
      ->default_str("4")
      ->check(CLI::Range(1, 4096));
  command
      .add_option("--dtype", options.dtype,
                  "Data type of operands; f16 and e4m3 on GPUs only (default: f32; of moe on GPUs "
                  "bf16)")
      ->check(CLI::IsMember({"f32", "bf16", "f16", "e4m3"}))
      ->default_str("f32; moe on GPUs: bf16");
  command.add_option("--scaling", options.scaling, "Scales of e4m3, per tensor or per row")
      ->check(CLI::IsMember({"tensor", "row"}))
      ->default_str("tensor");
  command
      .add_option("--codec", options.codec,
                  "Wire format, such as int4:g32: of ag_gemm, gemm_rs, gemm_ar, moe (both ways) "
                  "and collectives on CPU and GPU ranks, of prefill and moe's operators on CPU "
                  "ranks; lossless on GPU ranks: of all_gather and all_to_all")
      ->capture_default_str();
  command.add_flag("--add-norm", options.request.add_norm,
                   "Add a residual and its RMSNorm to gemm_ar, in the same call");
}

void declare_moe(CLI::App& command, MoeBench& moe) {
  command.option_defaults()->group("Experts (moe and its operators)");
  std::vector<std::string> models;
  for (const MoeModel& model : moe_models()) models.emplace_back(model.name);
  command
      .add_option("--model", moe.model,
                  fmt::format("Experts, top-k and widths of a published layer: {}",
                              fmt::join(models, ", ")))
      ->option_text("NAME")
      ->check(CLI::IsMember(models));
  const CLI::Range counts(1, 1 << 20);
  command.add_option("--experts", moe.experts, "Experts of all ranks (default: the model's)")
      ->check(counts);
  command.add_option("--top-k", moe.top_k, "Experts of a row (default: the model's)")
      ->check(counts);
  command.add_option("--hidden", moe.hidden, "Features of a row (default: the model's)")
      ->check(counts);
  command.add_option("--ffn", moe.ffn, "Width inside an expert (default: the model's)")
      ->check(counts);
  command.add_option("--ep", moe.ep, "Ranks that share the experts (default: ranks / tp)")
      ->check(CLI::Range(1, 4096));
  command.add_option("--tp", moe.tp, "Ranks that share each expert")
      ->capture_default_str()
      ->check(CLI::Range(1, 4096));
  command
      .add_option("--imbalance", moe.imbalance,
                  "Rows of the fullest EP rank over the mean, about: 1 (experts at random) to ep, "
                  "or zipf for Zipf's law over the experts (default: 1)")
      ->transform(CLI::Transformer(std::map<std::string, std::string>{{"zipf", "0"}}))
      ->option_text("X|zipf")
      ->check(CLI::Range(0., 4096.));
  command
      .add_option("--hidden-scale", moe.scale,
                  "Divide the model's hidden and expert widths by N; times are then not the "
                  "model's")
      ->capture_default_str()
      ->check(CLI::Range(1, 1024));
  command.add_flag("--backward", moe.backward, "Time forward and backward passes of moe");
  command
      .add_option_function<std::string>(
          "--save", [&moe](const std::string& name) { moe.save = parse_moe_save(name); },
          "Rows that moe saves for --backward on CPU ranks (sorted)")
      ->option_text("sorted|rows|recompute");
}

void declare_output(CLI::App& command, BenchOptions& options) {
  command.option_defaults()->group("Measurement and output");
  command
      .add_option("--chunks", options.request.chunks,
                  "Transfers per shard on CPU ranks (0: the fastest of 1, 2, 3, 5)")
      ->capture_default_str()
      ->check(CLI::Range(0, 16));
  command.add_option("--repeats", options.request.repeats, "Timed rounds")
      ->capture_default_str()
      ->check(CLI::Range(1, 1000000));
  command.add_flag("!--no-library", options.request.library,
                   "Leave out MPI's own collective, which one under mpirun is compared with");
  command.add_option("--json", options.json, "Write the results to FILE (-: print only them)");
  command.add_option("--csv", options.csv,
                     "Write them as comma-separated values to FILE (-: print only them)");
  command.add_flag("--explain", options.explain, "Explain the columns of the table");
  command.add_option("--timeline", options.timeline,
                     "Record one more overlapped call in FILE, with the ranks' clocks aligned (see "
                     "tandem trace)");
}

constexpr const char* kFooter = R"(
Examples:
  tandem bench gemm_rs --ranks 2 --m 2048 --n 2048 --k 2048 --link 150MB/s,20us
  tandem bench ag_gemm --m 512 1024 2048 --dtype bf16 --json result.json
  mpirun -n 2 tandem bench all_reduce --bytes 16K:64M       next to MPI_Allreduce
  tandem bench all_reduce --ranks 2 --bytes 64M --codec int4:g32 --link 125MB/s,50us
  tandem bench ag_gemm --ranks 2 --m 512 --codec int8 --link 125MB/s,50us
  tandem bench gemm_ar --transport nccl --ranks 4 --dtype bf16 --shapes 16x8192x8192
  tandem bench prefill --ranks 2 --m 256 --k 512 --codec int4:g32 --link 25MB/s,100us
  tandem bench moe --model qwen2-moe-2.7b --ep 2 --tokens 256 --hidden-scale 8
  tandem bench moe --experts 60 --top-k 4 --hidden 256 --ffn 128 --ep 2 --tokens 256
  tandem bench gemm_ar --add-norm --ranks 2 --m 16 --n 1024 --k 4096

A collective moves an m x n matrix of uniform values, or over lossless, whose gain depends
on the values, of standard normal ones. On one GPU an operator is its product, next to a bare
call of that. Exit code 1: a result was wrong.)";

}  // namespace

void declare(CLI::App& command, BenchOptions& options) {
  command
      .add_option("op", options.request.op,
                  fmt::format("Operator or collective to time: {}", fmt::join(bench_ops(), ", ")))
      ->check(CLI::IsMember(bench_ops()));
  declare_ranks(command, options);
  declare_shapes(command, options);
  declare_moe(command, options.request.moe);
  declare_output(command, options);
  command.option_defaults()->group("Options");  // of subcommands
  command.footer(kFooter);
}

namespace {

/// Parses "1024x4096x2048" as m, n, k.
std::tuple<int64_t, int64_t, int64_t> parse_shape(const std::string& text) {
  long long m = 0, n = 0, k = 0;
  int used = 0;
  if (std::sscanf(text.c_str(), "%18lldx%18lldx%18lld%n", &m, &n, &k, &used) != 3 ||
      size_t(used) != text.size()) {
    throw InvalidArgument("--shapes " + text + ": expected MxNxK");
  }
  return {m, n, k};
}

constexpr int64_t kDefaultSize = 1024;
constexpr int64_t kMaxBytes = int64_t{1} << 40;

/// Removes a size such as "64K" from the start of `text`; 0 if there is none up to kMaxBytes.
int64_t take_bytes(std::string_view& text) {
  int64_t count = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), count);
  if (error != std::errc()) return 0;
  text.remove_prefix(size_t(end - text.data()));
  constexpr std::string_view kUnits = "KMG";
  const size_t unit = text.empty() ? kUnits.npos : kUnits.find(text[0]);
  const int shift = unit == kUnits.npos ? 0 : 10 * (int(unit) + 1);
  if (shift > 0) text.remove_prefix(1);
  return count > 0 && count <= kMaxBytes >> shift ? count << shift : 0;
}

/// Shapes the request as a matrix of `bytes` bytes with gcd(elements, 64) rows.
void shape_as(BenchRequest& request, int64_t bytes) {
  const auto size = int64_t(size_of(request.dtype));
  if (bytes % size != 0) {
    throw InvalidArgument(fmt::format("--bytes: {} in {}: expected a multiple of {}", bytes,
                                      name_of(request.dtype), size));
  }
  const int64_t elements = bytes / size;
  request.m = std::gcd(elements, int64_t{64});
  request.n = elements / request.m;
}

/// Name of a given option that applies only to MoE layers; empty: none.
std::string_view moe_option(const MoeBench& moe) {
  const MoeBench none;
  if (!moe.model.empty()) return "--model";
  if (moe.experts != none.experts) return "--experts";
  if (moe.top_k != none.top_k) return "--top-k";
  if (moe.hidden != none.hidden) return "--hidden";
  if (moe.ffn != none.ffn) return "--ffn";
  if (moe.ep != none.ep) return "--ep";
  if (moe.tp != none.tp) return "--tp";
  if (moe.imbalance != none.imbalance) return "--imbalance";
  if (moe.scale != none.scale) return "--hidden-scale";
  if (moe.save != none.save) return "--save";
  return moe.backward ? "--backward" : "";
}

// Rejects options that would be ignored.
void check_options(const BenchOptions& options) {
  const bool gpus = options.transport == "nccl";
  if (gpus && options.request.chunks != 0) {
    throw InvalidArgument(
        fmt::format("--chunks {} with --transport nccl: expected 0: on GPUs the "
                    "tuner chooses",
                    options.request.chunks));
  }
  if (const MoeSave save = options.request.moe.save; gpus && save != MoeSave::sorted) {
    throw InvalidArgument(
        fmt::format("--save {} with --transport nccl: expected sorted on GPUs", name_of(save)));
  }
  if (!gpus && options.ranks_per_gpu != 1) {
    throw InvalidArgument(fmt::format("--ranks-per-gpu {}: expected --transport nccl with it",
                                      options.ranks_per_gpu));
  }
  if (!options.scaling.empty() && options.dtype != "e4m3") {
    throw InvalidArgument(
        fmt::format("--scaling {} with {}: expected --dtype e4m3", options.scaling,
                    options.dtype.empty() ? "no --dtype" : "--dtype " + options.dtype));
  }
  if (options.request.chunks != 0 && !is_gemm(options.request.op)) {
    throw InvalidArgument(fmt::format("--chunks {} with {}: expected an operator with a product",
                                      options.request.chunks, options.request.op));
  }
  if (options.k && !is_gemm(options.request.op)) {
    throw InvalidArgument(fmt::format("--k {} with {}, which moves an m x n matrix: expected none",
                                      *options.k, options.request.op));
  }
  if (!options.bytes.empty() && is_gemm(options.request.op)) {
    throw InvalidArgument(fmt::format(
        "--bytes with {}: expected a collective; --m takes several sizes", options.request.op));
  }
  const bool moe = is_moe(options.request.op);
  if (moe && (options.n || options.k || !options.shapes.empty())) {
    throw InvalidArgument(fmt::format(
        "{}: --n, --k or --shapes: expected --model, or --hidden and --ffn", options.request.op));
  }
  const MoeBench& sizes = options.request.moe;
  if (moe && sizes.model.empty() && !sizes.has_all_sizes()) {
    throw InvalidArgument(
        fmt::format("{}: expected --model NAME, or all of --experts, --top-k, --hidden and --ffn",
                    options.request.op));
  }
  if (const std::string_view option = moe_option(options.request.moe); !moe && !option.empty()) {
    throw InvalidArgument(
        fmt::format("{} with {}: expected moe or an operator of it", option, options.request.op));
  }
  if (!options.request.library && is_gemm(options.request.op)) {
    throw InvalidArgument(
        fmt::format("--no-library with {}: expected a collective", options.request.op));
  }
  const bool prefill = is_prefill(options.request.op);
  if (prefill && (gpus || options.request.chunks != 0)) {
    throw InvalidArgument(fmt::format("prefill {}: expected CPU ranks, and its own two chunks",
                                      gpus ? "--transport nccl" : "--chunks"));
  }
  if (!prefill && options.layers) {
    throw InvalidArgument(
        fmt::format("--layers {} with {}: expected prefill", *options.layers, options.request.op));
  }
  if (options.json == "-" && options.csv == "-") {
    throw InvalidArgument("--json - and --csv -: expected one of them on standard output");
  }
  if (!options.csv.empty() && options.csv != "-" &&
      (options.csv == options.json || options.csv == options.timeline)) {
    throw InvalidArgument(fmt::format("--csv and {}: both {}: expected two files",
                                      options.csv == options.json ? "--json" : "--timeline",
                                      options.csv));
  }
  const size_t shapes = std::max({options.shapes.size(), options.m.size(),
                                  options.bytes.empty() ? 0 : parse_sizes(options.bytes).size()});
  if (!options.timeline.empty() && shapes > 1) {
    throw InvalidArgument(fmt::format("--timeline: {} shapes: expected one", shapes));
  }
  if (!options.timeline.empty() && options.timeline == options.json) {
    throw InvalidArgument(
        fmt::format("--timeline and --json: both {}: expected two files", options.json));
  }
}

/// MoE layers on GPUs do not support f32.
std::string default_dtype(const BenchOptions& options) {
  return options.transport == "nccl" && is_moe(options.request.op) ? "bf16" : "f32";
}

/// Under a launcher 1, replaced by the launcher's number of ranks.
int default_ranks(const std::string& transport) {
  if (launched() || transport == "mpi" || transport == "processes") return 1;
  return transport == "nccl" ? std::max(1, gpu_count()) : 2;
}

}  // namespace

std::vector<int64_t> parse_sizes(const std::string& text) {
  std::string_view rest = text;
  const auto take = [&](std::string_view mark) {
    const bool there = rest.starts_with(mark);
    if (there) rest.remove_prefix(mark.size());
    return there;
  };
  const int64_t first = take_bytes(rest);
  const int64_t last = take(":") ? take_bytes(rest) : first;
  const int64_t factor = take(":x") ? take_bytes(rest) : 4;
  if (first < 1 || last < first || factor < 2 || !rest.empty()) {
    throw InvalidArgument(fmt::format(
        "--bytes {}: expected FIRST:LAST or FIRST:LAST:xFACTOR, e.g. 16K:256M or 1M:64M:x2, "
        "of 1 to 1024G bytes",
        text));
  }
  std::vector<int64_t> sizes;
  for (int64_t bytes = first;; bytes *= factor) {
    sizes.push_back(bytes);
    if (bytes > last / factor) return sizes;
  }
}

BenchPlan make_plan(const BenchOptions& options) {
  if (options.transport == "mpi" && !options.ranks && !launched_by_mpi() && *kMpiVersion) {
    throw InvalidArgument(
        "--transport mpi: not started by mpirun: expected mpirun -n RANKS tandem bench ..., "
        "--transport threads, or --ranks with the size of the world that another launcher started");
  }
  if (options.transport == "processes" && !launched_by_environment()) {
    throw InvalidArgument(
        "--transport processes: not started by torchrun or srun: expected torchrun "
        "--nproc_per_node RANKS --no_python tandem bench ...");
  }
  check_options(options);
  BenchPlan plan;
  const bool shared = options.ranks_per_gpu > 1;
  const MoeBench& moe = options.request.moe;
  plan.world.ranks = options.ranks               ? options.ranks
                     : moe.ep > 0 && !launched() ? moe.ep * moe.tp
                     : shared                    ? options.ranks_per_gpu
                                                 : default_ranks(options.transport);
  plan.world.ranks_per_gpu = options.ranks_per_gpu;
  if (!options.link.empty()) plan.world.link = EmulatedLink::parse(options.link);
  BenchRequest request = options.request;
  request.timeline = !options.timeline.empty();
  request.dtype = parse_dtype(options.dtype.empty() ? default_dtype(options) : options.dtype);
  request.wire = Wire::parse(options.codec);
  request.scaling = options.scaling == "row" ? Scaling::row : Scaling::tensor;
  request.n = options.n.value_or(kDefaultSize);
  request.layers = options.layers.value_or(request.layers);
  request.k = options.k.value_or(kDefaultSize);
  const auto add = [&] {
    if (is_moe(request.op)) complete_moe(request, launched() ? 0 : plan.world.ranks);
    // Under a launcher the number of ranks is not known yet; GPU ranks need no host memory.
    if (!launched() && options.transport != "nccl") check_bench(request, plan.world.ranks);
    plan.requests.push_back(request);
  };
  for (const std::string& text : options.shapes) {
    std::tie(request.m, request.n, request.k) = parse_shape(text);
    add();
  }
  for (const int64_t bytes :
       options.bytes.empty() ? std::vector<int64_t>{} : parse_sizes(options.bytes)) {
    shape_as(request, bytes);
    add();
  }
  if (!plan.requests.empty()) return plan;
  for (const int64_t m : options.m.empty() ? std::vector{kDefaultSize} : options.m) {
    request.m = m;
    add();
  }
  return plan;
}

}  // namespace tandem
