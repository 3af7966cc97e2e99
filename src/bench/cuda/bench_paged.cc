#include "bench/bench_paged.h"

#include <memory>

#include "bench/cuda/bench_setting.h"
#include "core/cuda/graph.h"
#include "kernels/cuda/hopper_chunks.h"

namespace tandem {

bool has_paged_clusters(const PagedBench& request) {
  return request.dtype == DType::bf16 && gpu::has_hopper_pages(request.head_dim);
}

std::vector<BenchTimes> time_on_gpus(Communicator& any, const std::vector<BoundCandidate>& forms,
                                     int repeats) {
  gpu::GpuCommunicator& comm = gpu::as_gpu(any);
  std::vector<BoundCandidate> launches;
  std::vector<std::unique_ptr<gpu::Graph>> graphs;
  for (const BoundCandidate& form : forms) {
    graphs.push_back(std::make_unique<gpu::Graph>(comm.stream(), form.run));
    launches.push_back({.name = form.name, .run = [graph = graphs.back().get(), &comm] {
                          graph->launch(comm.stream());
                        }});
  }
  auto& stopwatch = comm.attached<gpu::Stopwatch>([&] { return new gpu::Stopwatch(comm); });
  std::vector<BenchTimes> times;
  for (const gpu::Timing& each : stopwatch.measure(launches, {.repeats = repeats})) {
    times.push_back(gpu::times_of(each));
  }
  return times;
}

}  // namespace tandem
