// Preloaded: allocations FAILING_FROM to FAILING_FROM + FAILING_COUNT - 1 of the program fail,
// counted from the begin of main. Those that libraries make for themselves succeed: some of them
// end the process or use what they did not get, which no program can mend. With FAILING_TOTAL, a
// file, the number of allocations is written to it at the end.
#include <dlfcn.h>
#include <execinfo.h>
#include <fcntl.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>

extern "C" {
// Names of the C library.
void* __libc_malloc(size_t bytes);
void* __libc_calloc(size_t count, size_t bytes);
void* __libc_realloc(void* memory, size_t bytes);
void* __libc_memalign(size_t alignment, size_t bytes);
}

namespace {

std::atomic<bool> is_counting = false;
std::atomic<long> allocations = 0;
long first = -1, last = -1;
const void* program = nullptr;  // where it is loaded
const void* here = nullptr;

/// Address at which the object of `code` is loaded, and its file.
Dl_info object_of(const void* code) {
  Dl_info info{};
  ::dladdr(code, &info);
  return info;
}

/// Whether the innermost frame of neither this library nor the C++ library is of the program.
bool asked_by_program() {
  std::array<void*, 32> frames;
  const int depth = ::backtrace(frames.data(), int(frames.size()));
  for (int i = 0; i < depth; ++i) {
    const Dl_info object = object_of(frames[size_t(i)]);
    if (object.dli_fbase == here) continue;
    if (object.dli_fname && std::strstr(object.dli_fname, "libstdc++")) continue;
    return object.dli_fbase == program;
  }
  return false;
}

bool fails() {
  if (!is_counting) return false;
  const long number = ++allocations;
  if (number < first || number > last) return false;
  [[gnu::tls_model("initial-exec")]] static thread_local bool is_asking = false;  // others allocate
  if (is_asking) return false;
  is_asking = true;
  const bool result = asked_by_program();
  is_asking = false;
  if (result) errno = ENOMEM;
  return result;
}

long number_of(const char* name, long otherwise) {
  const char* const text = std::getenv(name);
  return text ? std::atol(text) : otherwise;
}

__attribute__((constructor)) void prepare() {
  first = number_of("FAILING_FROM", -1);
  last = first + number_of("FAILING_COUNT", 1) - 1;
  here = object_of(reinterpret_cast<const void*>(&prepare)).dli_fbase;
  std::array<void*, 4> frames;
  ::backtrace(frames.data(), int(frames.size()));  // loads the unwinder
}

__attribute__((destructor)) void tell() {
  const char* const path = std::getenv("FAILING_TOTAL");
  if (!path || !is_counting.exchange(false)) return;
  if (std::FILE* const file = std::fopen(path, "w")) {
    std::fprintf(file, "%ld\n", allocations.load());
    std::fclose(file);
  }
}

}  // namespace

/// The first call in main, from which on allocations count.
std::new_handler std::set_new_handler(std::new_handler handler) noexcept {
  using Set = std::new_handler (*)(std::new_handler);
  const auto set = reinterpret_cast<Set>(::dlsym(RTLD_NEXT, "_ZSt15set_new_handlerPFvvE"));
  program = object_of(__builtin_return_address(0)).dli_fbase;
  is_counting = true;
  return set(handler);
}

extern "C" {

void* malloc(size_t bytes) {
  return fails() ? nullptr : __libc_malloc(bytes);
}
void* calloc(size_t count, size_t bytes) {
  return fails() ? nullptr : __libc_calloc(count, bytes);
}
void* realloc(void* memory, size_t bytes) {
  return fails() ? nullptr : __libc_realloc(memory, bytes);
}
void* memalign(size_t alignment, size_t bytes) {
  return fails() ? nullptr : __libc_memalign(alignment, bytes);
}
void* aligned_alloc(size_t alignment, size_t bytes) {
  return fails() ? nullptr : __libc_memalign(alignment, bytes);
}
int posix_memalign(void** memory, size_t alignment, size_t bytes) {
  void* const made = fails() ? nullptr : __libc_memalign(alignment, bytes);
  if (made) *memory = made;
  return made ? 0 : ENOMEM;
}

}  // extern "C"
