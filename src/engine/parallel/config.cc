#include "engine/parallel/config.h"

#include "engine/config/section.h"

namespace tandem {
namespace {

constexpr Key<ParallelConfig> kParallelKeys[] = {
    {"tp", &ParallelConfig::tp, Range(1, 4096), "tensor parallel ranks (--tp)"},
    {"dp", &ParallelConfig::dp, Range(1, 4096), "data parallel ranks (--dp)"},
    {"replicas", &ParallelConfig::replicas, Range(0, 4096),
     "replicas whose sums a run keeps at fewer ranks (0: parallel.dp, or a resumed run's)"},
    {"dp_shard", &ParallelConfig::dp_shard, Range(0, 4096),
     "consecutive replicas that divide the state; groups of them have copies (0: parallel.dp)"},
    {"dp_host", &ParallelConfig::dp_host, Range(0, 4096),
     "consecutive replicas, of a host, whose gradients are summed before those of hosts (0: all "
     "at once)"},
    {"ep", &ParallelConfig::ep, Range(1, 4096),
     "ranks that share the experts (--ep); divides parallel.dp"},
    {"zero", &ParallelConfig::zero, Range(0, 2),
     "divided among replicas: 0 nothing, 1 optimizer state, 2 gradients, too"},
    {"pp", &ParallelConfig::pp, Range(1, 4096), "pipeline parallel ranks (--pp)"},
    {"virtual_stages", &ParallelConfig::virtual_stages, Range(1, 64), "stages of a pipeline rank"},
    {"schedule", &ParallelConfig::schedule, kAny,
     "order of the pipeline's passes (docs/guide/pipelines.md)"},
    {"layers_per_stage", &ParallelConfig::layers_per_stage, Range(0, 4096),
     "layers of each stage, as [5, 6, 5] (empty: equal shares)"},
    {"dp_bucket_mib", &ParallelConfig::dp_bucket_mib, Range(0, 1e6),
     "MiB of gradients that leave together (0: 1, on GPUs 100)"},
    {"strategy", &ParallelConfig::strategy, one_of("automatic", "serial", "overlapped"),
     "of the overlap operators"},
    {"chunks", &ParallelConfig::chunks, Range(0, 4096),
     "transfers per shard when overlapped (0: chosen)"},
    {"link", &ParallelConfig::link, kAny,
     "emulated link between ranks that are threads, \"1GB/s,20us\""},
    {"codec", &ParallelConfig::codec, kAny,
     "what the forward pass's sums over tensor-parallel ranks travel as (--codec): \"int8\", "
     "\"mlp=int4:g32,attention=int8\"; also experts' rows and sums, embeddings' rows, gradients "
     "and weights between data-parallel ranks, and rows between pipeline stages: "
     "\"gradients=int4:g32,weights=lossless,stages=int8\"; or a table of these"},
    {"error_feedback", &ParallelConfig::error_feedback, kAny,
     "what encoding a gradient loses is added to the next step's"},
};

}  // namespace

std::span<const Key<ParallelConfig>> ParallelConfig::keys() {
  return kParallelKeys;
}

}  // namespace tandem
