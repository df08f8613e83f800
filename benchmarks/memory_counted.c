/* Counts what torch's allocator of host memory holds, in every thread: preload it. c10 takes its memory by
 * posix_memalign and gives it back by free; what others take so is counted too. Sizes are those asked for. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>

#define SLOTS (1u << 22) /* of blocks alive at once; a power of two, so that a hash is masked */
#define GONE ((void*)1)

static struct {
  void* block;
  size_t size;
} slots[SLOTS];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static size_t now, peak;
static int (*real_memalign)(void**, size_t, size_t);
static void (*real_free)(void*);

static void in_child(void) { pthread_mutex_init(&lock, NULL); } /* whoever held it is not in the child */
__attribute__((constructor)) static void begin(void) { pthread_atfork(NULL, NULL, in_child); }

static size_t place(void* block) { return (size_t)(((uintptr_t)block >> 4) * 0x9E3779B97F4A7C15ull >> 20) & (SLOTS - 1); }

int posix_memalign(void** block, size_t alignment, size_t size) {
  if (!real_memalign) real_memalign = (int (*)(void**, size_t, size_t))dlsym(RTLD_NEXT, "posix_memalign");
  int failed = real_memalign(block, alignment, size);
  if (failed || !*block) return failed;
  pthread_mutex_lock(&lock);
  size_t at = place(*block);
  while (slots[at].block && slots[at].block != GONE) at = (at + 1) & (SLOTS - 1);
  slots[at].block = *block;
  slots[at].size = size;
  now += size;
  if (now > peak) peak = now;
  pthread_mutex_unlock(&lock);
  return 0;
}

void free(void* block) {
  if (!real_free) real_free = (void (*)(void*))dlsym(RTLD_NEXT, "free");
  if (now && block) {
    pthread_mutex_lock(&lock);
    for (size_t at = place(block); slots[at].block; at = (at + 1) & (SLOTS - 1)) {
      if (slots[at].block != block) continue;
      now -= slots[at].size;
      slots[at].block = slots[(at + 1) & (SLOTS - 1)].block ? GONE : NULL;
      break;
    }
    pthread_mutex_unlock(&lock);
  }
  real_free(block);
}

size_t counted_now(void) { return now; }
size_t counted_peak(void) { return peak; }
void counted_reset(void) { peak = now; }
