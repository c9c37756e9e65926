/* A stand-in for the CUDA runtime: memory is the host's, copies copy, kernels are recorded and do
 * nothing; streams, events and captures follow CUDA's rules and end in CUDA's error codes.
 * Written from the documented API. */
#include "standin.h"
#include <dlfcn.h>
#include <fcntl.h>
#include <stdarg.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

/* ---- settings and the record ------------------------------------------------------------- */

pthread_mutex_t weft_lock = PTHREAD_MUTEX_INITIALIZER;
__thread int weft_device;
static __thread cudaError_t last_error;
static __thread int current_op;
static __thread enum cudaStreamCaptureMode thread_mode = cudaStreamCaptureModeGlobal;
static __thread char line_text[600];
static void (*line_callback)(void);

static int record_file = -1, is_lazy = 1, num_devices = 1;
static uint64_t num_records, tick;
static const size_t device_bytes = (size_t)80 << 30;
static size_t used_bytes[64];

static const char *setting(const char *name, const char *otherwise) {
  const char *value = getenv(name);
  return value && *value ? value : otherwise;
}

/* Python ends a thread that asks for its lock while it ends itself, and in a destructor of torch that
 * ends the process: "terminate called without an active exception". Autograd's threads still let go of
 * what they hold when `backward` has returned. So Python's end waits until no thread is inside, and
 * then none enters any more. */
static pthread_rwlock_t python_lock = PTHREAD_RWLOCK_INITIALIZER;
static volatile int has_ended;

static void leave_python(void) { pthread_rwlock_unlock(&python_lock); }
static int enter_python(void) {
  pthread_rwlock_rdlock(&python_lock);
  if (!has_ended) return 1;
  leave_python();
  return 0;
}

/* For Python: the last that it does. The caller does not hold Python's lock. */
EXPORT void weft_dryrun_end(void) {
  has_ended = 1;
  pthread_rwlock_wrlock(&python_lock);
  pthread_rwlock_unlock(&python_lock);
}

/* A forked child has a record of its own, and locks that no thread of its parent holds. */
static void hold_record(void) { pthread_mutex_lock(&weft_lock); }
static void release_record(void) { pthread_mutex_unlock(&weft_lock); }
static void forget_record(void) {
  record_file = -1, num_records = 0;
  python_lock = (pthread_rwlock_t)PTHREAD_RWLOCK_INITIALIZER;
  release_record();
}

__attribute__((constructor)) static void start(void) {
  is_lazy = strcmp(setting("WEFT_DRYRUN_EVENTS", "lazy"), "eager") != 0;
  num_devices = atoi(setting("WEFT_DRYRUN_DEVICES", "1"));
  pthread_atfork(hold_record, release_record, forget_record);
}

static void give_up(void) {
  fprintf(stderr, "torchweft dryrun: the record cannot be written; is the disk full?\n");
  _exit(70);
}

static void open_record(void) {
  char name[4096], head[600];
  snprintf(name, sizeof name, "%s/calls-%d.jsonl", setting("WEFT_DRYRUN_FOLDER", "."), getpid());
  record_file = open(name, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
  int size = snprintf(head, sizeof head,
      "{\"n\":0,\"call\":\"process\",\"pid\":%d,\"rank\":%d,\"devices\":%d,\"events\":\"%s\"}\n",
      getpid(), atoi(setting("RANK", "-1")), num_devices, is_lazy ? "lazy" : "eager");
  if (record_file < 0 || write(record_file, head, size) != size) give_up();
}

void weft_record(const char *call, const char *format, ...) {
  static __thread char line[8192];
  pthread_mutex_lock(&weft_lock);
  if (record_file < 0) open_record();
  int used = snprintf(line, sizeof line, "{\"n\":%lu,\"call\":\"%s\"", ++num_records, call);
  va_list fields;
  va_start(fields, format);
  used += vsnprintf(line + used, sizeof line - used - 4, format, fields);
  va_end(fields);
  if (used > (int)sizeof line - 4) used = sizeof line - 4;
  line[used++] = '}';
  line[used++] = '\n';
  if (write(record_file, line, used) != used) give_up();
  pthread_mutex_unlock(&weft_lock);
}

/* For Python: the op that the next calls of this thread belong to, notes, and lines. */
EXPORT void weft_dryrun_op(int op) { current_op = op; }
EXPORT void weft_dryrun_line(const char *text) { snprintf(line_text, sizeof line_text, "%s", text); }
EXPORT void weft_dryrun_callback(void (*callback)(void)) { line_callback = callback; }
EXPORT int weft_dryrun_stream(void *stream) { return weft_stream(stream)->id; }

EXPORT void weft_dryrun_note(const char *text, size_t size) {
  pthread_mutex_lock(&weft_lock);
  if (record_file < 0) open_record();
  char head[64];
  int used = snprintf(head, sizeof head, "{\"n\":%lu,", ++num_records);
  char *line = malloc(size + used + 2);
  memcpy(line, head, used);
  memcpy(line + used, text, size);
  line[used + size] = '\n';
  if (write(record_file, line, used + size + 1) < 0) give_up();
  free(line);
  pthread_mutex_unlock(&weft_lock);
}

const char *weft_where(int how) {
  static __thread char where[700];
  static int (*has_python)(void);
  if (current_op) {
    snprintf(where, sizeof where, ",\"op\":%d", current_op);
    return where;
  }
  if (!has_python) has_python = dlsym(RTLD_DEFAULT, "PyGILState_Check");
  if (!how || !line_callback || (how == 1 && !has_python()) || !enter_python()) return "";
  line_text[0] = 0;
  line_callback();
  leave_python();
  snprintf(where, sizeof where, ",\"line\":\"%s\"", line_text);
  return where;
}

cudaError_t weft_fail(const char *name, cudaError_t code) {
  last_error = code;
  if (code != cudaSuccess && code != cudaErrorNotReady)
    weft_record("error", ",\"name\":\"%s\",\"code\":%d%s", name, code, weft_where(code == cudaErrorMemoryAllocation ? 1 : 2));
  return code;
}
#define FAIL(code) return weft_fail(__func__, code)
#define CHECK(expression) \
  do { cudaError_t code_ = (expression); if (code_ != cudaSuccess) return weft_fail(__func__, code_); } while (0)

int weft_unmodelled(const char *name, int code) {
  weft_record("unmodelled", ",\"name\":\"%s\"%s", name, weft_where(1));
  fprintf(stderr, "torchweft dryrun: %s is not modelled; it returns error %d\n", name, code);
  if (!strncmp(name, "cuda", 4)) last_error = code;
  return code;
}

/* For Python: something that is not modelled; its line is where Python is. */
EXPORT void weft_dryrun_unmodelled(const char *what) {
  int op = current_op;
  current_op = 0;
  weft_record("unmodelled", ",\"name\":\"%s\"%s", what, weft_where(2));
  current_op = op;
}

/* ---- errors, devices, versions ----------------------------------------------------------- */

static const struct { cudaError_t code; const char *name, *text; } ERRORS[] = {
  {cudaSuccess, "cudaSuccess", "no error"},
  {cudaErrorInvalidValue, "cudaErrorInvalidValue", "invalid argument"},
  {cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation", "out of memory"},
  {cudaErrorInvalidDevice, "cudaErrorInvalidDevice", "invalid device ordinal"},
  {cudaErrorInvalidResourceHandle, "cudaErrorInvalidResourceHandle", "invalid resource handle"},
  {cudaErrorNotReady, "cudaErrorNotReady", "device not ready"},
  {cudaErrorLaunchTimeout, "cudaErrorLaunchTimeout", "a rank never came to the collective"},
  {cudaErrorNotSupported, "cudaErrorNotSupported", "not modelled by the dry run"},
  {cudaErrorPeerAccessAlreadyEnabled, "cudaErrorPeerAccessAlreadyEnabled", "peer access is already enabled"},
  {cudaErrorStreamCaptureUnsupported, "cudaErrorStreamCaptureUnsupported", "operation not permitted when stream is capturing"},
  {cudaErrorStreamCaptureInvalidated, "cudaErrorStreamCaptureInvalidated", "operation failed due to a previous error during capture"},
  {cudaErrorStreamCaptureMerge, "cudaErrorStreamCaptureMerge", "operation would result in a merge of separate capture sequences"},
  {cudaErrorStreamCaptureUnmatched, "cudaErrorStreamCaptureUnmatched", "capture was not ended in the same stream as it began"},
  {cudaErrorStreamCaptureUnjoined, "cudaErrorStreamCaptureUnjoined", "capturing stream has unjoined work"},
  {cudaErrorStreamCaptureIsolation, "cudaErrorStreamCaptureIsolation", "dependency created on uncaptured work in another stream"},
  {cudaErrorStreamCaptureImplicit, "cudaErrorStreamCaptureImplicit", "operation would make the legacy stream depend on a capturing blocking stream"},
  {cudaErrorCapturedEvent, "cudaErrorCapturedEvent", "operation not permitted on an event last recorded in a capturing stream"},
  {cudaErrorStreamCaptureWrongThread, "cudaErrorStreamCaptureWrongThread", "attempt to terminate a thread-local capture sequence from another thread"},
};

EXPORT const char *cudaGetErrorName(cudaError_t error) {
  for (size_t i = 0; i < sizeof ERRORS / sizeof *ERRORS; i++)
    if (ERRORS[i].code == error) return ERRORS[i].name;
  return "an error that the dry run does not name";
}
EXPORT const char *cudaGetErrorString(cudaError_t error) {
  for (size_t i = 0; i < sizeof ERRORS / sizeof *ERRORS; i++)
    if (ERRORS[i].code == error) return ERRORS[i].text;
  return "an error that the dry run does not name";
}
EXPORT cudaError_t cudaGetLastError(void) { cudaError_t e = last_error; last_error = cudaSuccess; return e; }
EXPORT cudaError_t cudaPeekAtLastError(void) { return last_error; }

EXPORT cudaError_t cudaDriverGetVersion(int *version) { *version = CUDART_VERSION; return cudaSuccess; }
EXPORT cudaError_t cudaRuntimeGetVersion(int *version) { *version = CUDART_VERSION; return cudaSuccess; }
EXPORT cudaError_t cudaGetDeviceCount(int *count) { *count = num_devices; return cudaSuccess; }
EXPORT cudaError_t cudaGetDevice(int *device) { *device = weft_device; return cudaSuccess; }
EXPORT cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= num_devices) FAIL(cudaErrorInvalidDevice);
  weft_device = device;
  return cudaSuccess;
}

EXPORT cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int device) {
  if (device < 0 || device >= num_devices) FAIL(cudaErrorInvalidDevice);
  memset(p, 0, sizeof *p);
  snprintf(p->name, sizeof p->name, "torchweft dry run");
  memcpy(p->uuid.bytes, "torchweft dryrun", 16);
  p->uuid.bytes[15] = (char)device;
  p->totalGlobalMem = device_bytes;
  p->sharedMemPerBlock = 48 << 10;
  p->sharedMemPerBlockOptin = 227 << 10;
  p->sharedMemPerMultiprocessor = 228 << 10;
  p->regsPerBlock = p->regsPerMultiprocessor = 65536;
  p->warpSize = 32;
  p->maxThreadsPerBlock = p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
  p->maxThreadsDim[2] = 64;
  p->maxGridSize[0] = 0x7fffffff;
  p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->totalConstMem = 64 << 10;
  p->major = 9;
  p->textureAlignment = 512;
  p->multiProcessorCount = 132;
  p->canMapHostMemory = p->concurrentKernels = p->unifiedAddressing = 1;
  p->streamPrioritiesSupported = p->cooperativeLaunch = p->clusterLaunch = 1;
  p->asyncEngineCount = 3;
  p->memoryBusWidth = 5120;
  p->l2CacheSize = 50 << 20;
  p->maxThreadsPerMultiProcessor = 2048;
  p->maxBlocksPerMultiProcessor = 32;
  p->pciBusID = device + 1;
  return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
  struct cudaDeviceProp p;
  CHECK(cudaGetDeviceProperties(&p, device));
  switch (attribute) {
    case cudaDevAttrMaxThreadsPerBlock: *value = p.maxThreadsPerBlock; break;
    case cudaDevAttrMaxBlockDimX: *value = p.maxThreadsDim[0]; break;
    case cudaDevAttrMaxBlockDimY: *value = p.maxThreadsDim[1]; break;
    case cudaDevAttrMaxBlockDimZ: *value = p.maxThreadsDim[2]; break;
    case cudaDevAttrMaxGridDimX: *value = p.maxGridSize[0]; break;
    case cudaDevAttrMaxGridDimY: *value = p.maxGridSize[1]; break;
    case cudaDevAttrMaxGridDimZ: *value = p.maxGridSize[2]; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = p.sharedMemPerBlock; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = p.sharedMemPerBlockOptin; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = p.sharedMemPerMultiprocessor; break;
    case cudaDevAttrWarpSize: *value = p.warpSize; break;
    case cudaDevAttrMaxRegistersPerBlock: *value = p.regsPerBlock; break;
    case cudaDevAttrMultiProcessorCount: *value = p.multiProcessorCount; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = p.maxThreadsPerMultiProcessor; break;
    case cudaDevAttrComputeCapabilityMajor: *value = p.major; break;
    case cudaDevAttrComputeCapabilityMinor: *value = p.minor; break;
    case cudaDevAttrL2CacheSize: *value = p.l2CacheSize; break;
    case cudaDevAttrClockRate: *value = 1500000; break;
    case cudaDevAttrMemoryClockRate: *value = 2600000; break;
    case cudaDevAttrGlobalMemoryBusWidth: *value = p.memoryBusWidth; break;
    case cudaDevAttrCooperativeLaunch: case cudaDevAttrUnifiedAddressing: *value = 1; break;
    case cudaDevAttrMemoryPoolsSupported: case cudaDevAttrPageableMemoryAccess: *value = 0; break;
    case cudaDevAttrHostNumaId: *value = -1; break;
    default: return weft_unmodelled("cudaDeviceGetAttribute", cudaErrorNotSupported);
  }
  return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceGetPCIBusId(char *text, int size, int device) {
  snprintf(text, size, "0000:%02x:00.0", device + 1);
  return cudaSuccess;
}
EXPORT cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
  if (least) *least = 0;
  if (greatest) *greatest = -5;
  return cudaSuccess;
}
EXPORT cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer) { *can = device != peer; return cudaSuccess; }
EXPORT cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned flags) { return cudaSuccess; }
EXPORT cudaError_t cudaProfilerStart(void) { return cudaSuccess; }
EXPORT cudaError_t cudaProfilerStop(void) { return cudaSuccess; }

/* ---- captures: who may do what ----------------------------------------------------------- */

static Graph *captures[256];
static int num_captures, num_graphs;

/* Calls that could wait for the device spoil a capture, as the modes of captures say. */
static cudaError_t unsafe(void) {
  if (thread_mode == cudaStreamCaptureModeRelaxed) return cudaSuccess;
  for (int i = 0; i < num_captures; i++) {
    Graph *graph = captures[i];
    int is_own = pthread_equal(graph->thread, pthread_self());
    int counts = is_own ? graph->mode != cudaStreamCaptureModeRelaxed
                        : graph->mode == cudaStreamCaptureModeGlobal && thread_mode == cudaStreamCaptureModeGlobal;
    if (counts) {
      graph->invalid = 1;
      return cudaErrorStreamCaptureUnsupported;
    }
  }
  return cudaSuccess;
}

static cudaError_t not_capturing(Stream *stream) {
  if (!stream->capture) return unsafe();
  stream->capture->invalid = 1;
  return cudaErrorStreamCaptureUnsupported;
}

EXPORT cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) {
  enum cudaStreamCaptureMode before = thread_mode;
  thread_mode = *mode;
  *mode = before;
  return cudaSuccess;
}

/* ---- memory ------------------------------------------------------------------------------ */

typedef struct { char *base; size_t bytes; int device; } Block;  /* device -1: the host's, pinned */
static Block *blocks;
static int num_blocks, room_for_blocks;
static pthread_mutex_t block_lock = PTHREAD_MUTEX_INITIALIZER;

static int block_below(const void *pointer) { /* the last block that starts at or before it */
  int low = 0, high = num_blocks;
  while (low < high) {
    int middle = (low + high) / 2;
    if (blocks[middle].base <= (const char *)pointer) low = middle + 1; else high = middle;
  }
  return low - 1;
}

static int find_block(const void *pointer, Block *block) {
  pthread_mutex_lock(&block_lock);
  int i = block_below(pointer);
  int hit = i >= 0 && (const char *)pointer < blocks[i].base + blocks[i].bytes;
  if (hit) *block = blocks[i];
  pthread_mutex_unlock(&block_lock);
  return hit;
}

static void add_block(void *base, size_t bytes, int device) {
  pthread_mutex_lock(&block_lock);
  if (num_blocks == room_for_blocks)
    blocks = realloc(blocks, (room_for_blocks = 2 * room_for_blocks + 64) * sizeof *blocks);
  int i = block_below(base) + 1;
  memmove(blocks + i + 1, blocks + i, (num_blocks++ - i) * sizeof *blocks);
  blocks[i] = (Block){base, bytes, device};
  if (device >= 0) used_bytes[device] += bytes;
  pthread_mutex_unlock(&block_lock);
}

static int drop_block(void *base, Block *block) {
  pthread_mutex_lock(&block_lock);
  int i = block_below(base), hit = i >= 0 && blocks[i].base == base;
  if (hit) {
    *block = blocks[i];
    if (block->device >= 0) used_bytes[block->device] -= block->bytes;
    memmove(blocks + i, blocks + i + 1, (--num_blocks - i) * sizeof *blocks);
  }
  pthread_mutex_unlock(&block_lock);
  return hit;
}

/* Pages cost nothing until they are written, so a large model fits. */
static void *pages(size_t bytes) {
  size_t huge = (size_t)2 << 20;  /* aligned as device memory is */
  char *raw = mmap(NULL, bytes + huge, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (raw == MAP_FAILED) return NULL;
  char *base = (char *)(((uintptr_t)raw + huge - 1) & ~(huge - 1));
  if (base > raw) munmap(raw, base - raw);
  if (base + bytes < raw + bytes + huge) munmap(base + bytes, raw + huge - base);
  return base;
}
static size_t whole_pages(size_t bytes) { return (bytes + 4095) & ~(size_t)4095; }

EXPORT cudaError_t cudaMalloc(void **pointer, size_t bytes) {
  CHECK(unsafe());
  *pointer = NULL;
  if (!bytes) return cudaSuccess;
  bytes = whole_pages(bytes);
  if (used_bytes[weft_device] + bytes > device_bytes || !(*pointer = pages(bytes)))
    FAIL(cudaErrorMemoryAllocation);
  add_block(*pointer, bytes, weft_device);
  weft_record("malloc", ",\"dev\":%d,\"ptr\":%lu,\"bytes\":%lu", weft_device, (uintptr_t)*pointer, bytes);
  return cudaSuccess;
}

static void finish_all(void);

EXPORT cudaError_t cudaFree(void *pointer) {
  Block block;
  if (!pointer) return cudaSuccess;
  CHECK(unsafe());
  if (!weft_settle(NULL, 0)) FAIL(cudaErrorLaunchTimeout);
  if (!drop_block(pointer, &block)) FAIL(cudaErrorInvalidValue);
  finish_all();  /* cudaFree waits for the device */
  weft_record("sync", ",\"what\":\"cudaFree\",\"dev\":%d%s", block.device, weft_where(1));
  munmap(pointer, block.bytes);
  return cudaSuccess;
}

EXPORT cudaError_t cudaHostAlloc(void **pointer, size_t bytes, unsigned flags) {
  CHECK(unsafe());
  if (!(*pointer = pages(whole_pages(bytes ? bytes : 1)))) FAIL(cudaErrorMemoryAllocation);
  add_block(*pointer, whole_pages(bytes ? bytes : 1), -1);
  return cudaSuccess;
}
EXPORT cudaError_t cudaMallocHost(void **pointer, size_t bytes) { return cudaHostAlloc(pointer, bytes, 0); }
EXPORT cudaError_t cudaFreeHost(void *pointer) {
  Block block;
  CHECK(unsafe());
  if (pointer && !drop_block(pointer, &block)) FAIL(cudaErrorInvalidValue);
  if (pointer) munmap(pointer, block.bytes);
  return cudaSuccess;
}
EXPORT cudaError_t cudaHostRegister(void *pointer, size_t bytes, unsigned flags) { add_block(pointer, bytes, -1); return cudaSuccess; }
EXPORT cudaError_t cudaHostUnregister(void *pointer) {
  Block block;
  if (!drop_block(pointer, &block)) FAIL(cudaErrorInvalidValue);
  return cudaSuccess;
}
EXPORT cudaError_t cudaHostGetDevicePointer(void **device, void *host, unsigned flags) { *device = host; return cudaSuccess; }

EXPORT cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total) {
  *total = device_bytes;
  *free_bytes = device_bytes - used_bytes[weft_device];
  return cudaSuccess;
}

EXPORT cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *a, const void *pointer) {
  Block block;
  memset(a, 0, sizeof *a);
  a->type = cudaMemoryTypeUnregistered;
  a->device = -1;
  if (find_block(pointer, &block)) {
    a->type = block.device < 0 ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
    a->device = block.device < 0 ? weft_device : block.device;
    a->devicePointer = (void *)pointer;
    a->hostPointer = block.device < 0 ? (void *)pointer : NULL;
  }
  return cudaSuccess;
}

/* ---- streams ----------------------------------------------------------------------------- */

static Stream *streams[MAX_STREAMS], *legacy[64];
static int num_streams, num_events;
static uint64_t done[MAX_STREAMS];  /* operations of each stream that a wait of the host has seen */
static pthread_mutex_t stream_lock = PTHREAD_MUTEX_INITIALIZER;

static Stream *new_stream(int device, int priority, int blocking) {
  Stream *stream = calloc(1, sizeof *stream);
  pthread_mutex_lock(&stream_lock);
  if (num_streams == MAX_STREAMS) {
    fprintf(stderr, "torchweft dryrun: more than %d streams\n", MAX_STREAMS);
    abort();
  }
  stream->id = num_streams;
  streams[num_streams++] = stream;
  pthread_mutex_unlock(&stream_lock);
  stream->device = device, stream->priority = priority, stream->blocking = blocking;
  weft_record("stream", ",\"s\":%d,\"dev\":%d,\"priority\":%d,\"blocking\":%d", stream->id, device, priority, blocking);
  return stream;
}

Stream *weft_stream(cudaStream_t handle) {
  if (handle == cudaStreamPerThread) {
    fprintf(stderr, "torchweft dryrun: the per-thread default stream is not modelled\n");
    abort();
  }
  if (handle && handle != cudaStreamLegacy) return (Stream *)handle;
  if (!legacy[weft_device]) legacy[weft_device] = new_stream(weft_device, 0, 2);
  return legacy[weft_device];
}

static void join(Clock *clock, const Clock *other) {
  for (int i = 0; i < num_streams; i++)
    if (other->seen[i] > clock->seen[i]) clock->seen[i] = other->seen[i];
}

int weft_issue(Stream *stream) {
  Graph *graph = stream->capture;
  if (graph) {
    if (graph->invalid) return -cudaErrorStreamCaptureInvalidated;
    stream->capture_clock.seen[stream->id] = ++stream->captured;
    graph->num_nodes++;
    return graph->id;
  }
  if (stream->blocking == 2) /* the legacy stream waits for blocking streams, captured ones too */
    for (int i = 0; i < num_captures; i++)
      if (captures[i]->origin->blocking == 1 && captures[i]->origin->device == stream->device) {
        captures[i]->invalid = 1;
        return -cudaErrorStreamCaptureImplicit;
      }
  stream->clock.seen[stream->id] = ++stream->position;
  return 0;
}
#define ISSUE(stream) \
  int graph = weft_issue(stream); \
  if (graph < 0) return weft_fail(__func__, -graph)

Node *weft_node(Stream *stream) {
  Node *node = calloc(1, sizeof *node);
  *stream->capture->last = node;
  stream->capture->last = &node->next;
  return node;
}

EXPORT cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) {
  weft_stream(0);  /* the default stream has the first number */
  *stream = (cudaStream_t)new_stream(weft_device, priority < -5 ? -5 : priority > 0 ? 0 : priority, !(flags & cudaStreamNonBlocking));
  return cudaSuccess;
}
EXPORT cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) { return cudaStreamCreateWithPriority(stream, flags, 0); }
EXPORT cudaError_t cudaStreamCreate(cudaStream_t *stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }
EXPORT cudaError_t cudaStreamDestroy(cudaStream_t stream) { return cudaSuccess; /* kept: its work goes on */ }
EXPORT cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority) { *priority = weft_stream(stream)->priority; return cudaSuccess; }
EXPORT cudaError_t cudaStreamGetFlags(cudaStream_t stream, unsigned *flags) { *flags = !weft_stream(stream)->blocking; return cudaSuccess; }
EXPORT cudaError_t cudaStreamGetDevice(cudaStream_t stream, int *device) { *device = weft_stream(stream)->device; return cudaSuccess; }
EXPORT cudaError_t cudaStreamGetId(cudaStream_t stream, unsigned long long *id) { *id = weft_stream(stream)->id; return cudaSuccess; }

/* The host has waited for everything that the clock has seen. */
static void finish(const Clock *clock) {
  for (int i = 0; i < num_streams; i++)
    if (clock->seen[i] > done[i]) done[i] = clock->seen[i];
}
static void finish_all(void) {
  for (int i = 0; i < num_streams; i++) done[i] = streams[i]->position;
}

/* Lazy: ready when a wait of the host says so, or when it has been asked so often that somebody waits. */
#define MAX_POLLS 1000
static int is_ready(const Clock *clock, int *num_polls) {
  int ready = 1;
  for (int i = 0; i < num_streams && ready; i++) ready = clock->seen[i] <= done[i];
  return ready || !is_lazy || ++*num_polls > MAX_POLLS;
}

EXPORT cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
  Stream *stream = weft_stream(handle);
  CHECK(not_capturing(stream));
  weft_record("sync", ",\"what\":\"cudaStreamSynchronize\",\"s\":%d%s", stream->id, weft_where(2));
  finish(&stream->clock);
  if (!weft_settle(NULL, 0)) FAIL(cudaErrorLaunchTimeout);
  return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceSynchronize(void) {
  CHECK(unsafe());
  weft_record("sync", ",\"what\":\"cudaDeviceSynchronize\",\"dev\":%d%s", weft_device, weft_where(2));
  for (int i = 0; i < num_streams; i++)
    if (streams[i]->device == weft_device) finish(&streams[i]->clock);
  if (!weft_settle(NULL, 0)) FAIL(cudaErrorLaunchTimeout);
  return cudaSuccess;
}

EXPORT cudaError_t cudaStreamQuery(cudaStream_t handle) {
  Stream *stream = weft_stream(handle);
  CHECK(not_capturing(stream));
  if (!is_ready(&stream->clock, &stream->num_polls)) FAIL(cudaErrorNotReady);
  stream->num_polls = 0;
  finish(&stream->clock);
  weft_record("query", ",\"s\":%d", stream->id);
  return cudaSuccess;
}

/* ---- events ------------------------------------------------------------------------------ */

EXPORT cudaError_t cudaEventCreateWithFlags(cudaEvent_t *handle, unsigned flags) {
  Event *event = calloc(1, sizeof *event);
  event->clock = calloc(1, sizeof *event->clock);
  event->id = __sync_add_and_fetch(&num_events, 1);
  *handle = (cudaEvent_t)event;
  return cudaSuccess;
}
EXPORT cudaError_t cudaEventCreate(cudaEvent_t *event) { return cudaEventCreateWithFlags(event, 0); }
EXPORT cudaError_t cudaEventDestroy(cudaEvent_t handle) {
  Event *event = (Event *)handle;
  free(event->clock);
  free(event);
  return cudaSuccess;
}

EXPORT cudaError_t cudaEventRecordWithFlags(cudaEvent_t handle, cudaStream_t stream_handle, unsigned flags) {
  Event *event = (Event *)handle;
  Stream *stream = weft_stream(stream_handle);
  if (flags & cudaEventRecordExternal) return weft_unmodelled("cudaEventRecordExternal", cudaErrorNotSupported);
  if (stream->capture && stream->capture->invalid) FAIL(cudaErrorStreamCaptureInvalidated);
  event->stream = stream, event->is_recorded = 1, event->num_polls = 0;
  event->graph = stream->capture;
  event->tick = __sync_add_and_fetch(&tick, 1);
  *event->clock = stream->capture ? stream->capture_clock : stream->clock;
  weft_record("record", ",\"s\":%d,\"e\":%d,\"g\":%d%s", stream->id, event->id, event->graph ? event->graph->id : 0, weft_where(1));
  return cudaSuccess;
}
EXPORT cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) { return cudaEventRecordWithFlags(event, stream, 0); }

EXPORT cudaError_t cudaStreamWaitEvent(cudaStream_t stream_handle, cudaEvent_t handle, unsigned flags) {
  Event *event = (Event *)handle;
  Stream *stream = weft_stream(stream_handle);
  Graph *from = event->graph, *to = stream->capture;
  if (flags & cudaEventWaitExternal) return weft_unmodelled("cudaEventWaitExternal", cudaErrorNotSupported);
  if (to && to->invalid) FAIL(cudaErrorStreamCaptureInvalidated);
  if (from && from->ended) FAIL(cudaErrorCapturedEvent);
  if (from && to && from != to) {
    from->invalid = to->invalid = 1;
    FAIL(cudaErrorStreamCaptureMerge);
  }
  if (to && !from && event->is_recorded) {
    to->invalid = 1;
    FAIL(cudaErrorStreamCaptureIsolation);
  }
  if (from && from->invalid) FAIL(cudaErrorStreamCaptureInvalidated);
  if (from && !to) { /* a fork: the stream joins the capture */
    stream->capture = from, stream->captured = 0;
    memset(&stream->capture_clock, 0, sizeof stream->capture_clock);
  }
  if (event->is_recorded) join(from ? &stream->capture_clock : &stream->clock, event->clock);
  weft_record("wait", ",\"s\":%d,\"e\":%d,\"g\":%d%s", stream->id, event->id, from ? from->id : 0, weft_where(1));
  return cudaSuccess;
}

static cudaError_t ask_event(Event *event) {
  if (event->graph) {
    if (!event->graph->ended) event->graph->invalid = 1;
    return cudaErrorCapturedEvent;
  }
  return unsafe();
}
EXPORT cudaError_t cudaEventQuery(cudaEvent_t handle) {
  Event *event = (Event *)handle;
  CHECK(ask_event(event));
  if (!event->is_recorded) return cudaSuccess;
  if (!is_ready(event->clock, &event->num_polls)) FAIL(cudaErrorNotReady);
  finish(event->clock);
  weft_record("query", ",\"e\":%d", event->id);
  return cudaSuccess;
}
EXPORT cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
  Event *event = (Event *)handle;
  CHECK(ask_event(event));
  weft_record("sync", ",\"what\":\"cudaEventSynchronize\",\"e\":%d%s", event->id, weft_where(2));
  if (event->is_recorded) finish(event->clock);
  if (!weft_settle(NULL, 0)) FAIL(cudaErrorLaunchTimeout);
  return cudaSuccess;
}
EXPORT cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t start_handle, cudaEvent_t end_handle) {
  Event *first = (Event *)start_handle, *last = (Event *)end_handle;
  if (!first->is_recorded || !last->is_recorded) FAIL(cudaErrorInvalidResourceHandle);
  int polls = 0;
  if (!is_ready(first->clock, &polls) || !is_ready(last->clock, &polls)) FAIL(cudaErrorNotReady);
  *ms = (float)(last->tick - first->tick) * 1e-3f;  /* no time passes here: calls, not clocks */
  return cudaSuccess;
}

/* ---- captures and graphs ----------------------------------------------------------------- */

EXPORT cudaError_t cudaStreamBeginCapture(cudaStream_t handle, enum cudaStreamCaptureMode mode) {
  Stream *stream = weft_stream(handle);
  if (stream->blocking == 2) FAIL(cudaErrorStreamCaptureUnsupported);  /* the legacy stream */
  if (stream->capture || num_captures == 256) FAIL(cudaErrorStreamCaptureUnsupported);
  Graph *graph = calloc(1, sizeof *graph);
  graph->id = __sync_add_and_fetch(&num_graphs, 1);
  graph->origin = stream, graph->mode = mode, graph->thread = pthread_self();
  graph->last = &graph->first;
  stream->capture = captures[num_captures++] = graph;
  stream->captured = 0;
  memset(&stream->capture_clock, 0, sizeof stream->capture_clock);
  weft_record("capture", ",\"s\":%d,\"g\":%d%s", stream->id, graph->id, weft_where(1));
  return cudaSuccess;
}

EXPORT cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t *result) {
  Stream *stream = weft_stream(handle);
  Graph *graph = stream->capture;
  *result = NULL;
  if (!graph) FAIL(cudaErrorInvalidValue);
  if (graph->origin != stream) FAIL(cudaErrorStreamCaptureUnmatched);
  if (graph->mode != cudaStreamCaptureModeRelaxed && !pthread_equal(graph->thread, pthread_self()))
    FAIL(cudaErrorStreamCaptureWrongThread);
  cudaError_t code = graph->invalid ? cudaErrorStreamCaptureInvalidated : cudaSuccess;
  for (int i = 0; i < num_streams; i++) {
    if (streams[i]->capture != graph) continue;
    if (!code && streams[i]->captured > stream->capture_clock.seen[i]) code = cudaErrorStreamCaptureUnjoined;
    streams[i]->capture = NULL;
  }
  graph->ended = 1;
  for (int i = 0; i < num_captures; i++)
    if (captures[i] == graph) captures[i] = captures[--num_captures];
  weft_record("captured", ",\"s\":%d,\"g\":%d,\"nodes\":%d,\"code\":%d", stream->id, graph->id, graph->num_nodes, code);
  if (code) FAIL(code);
  *result = (cudaGraph_t)graph;
  return cudaSuccess;
}

EXPORT cudaError_t cudaStreamIsCapturing(cudaStream_t handle, enum cudaStreamCaptureStatus *status) {
  Stream *stream = weft_stream(handle);
  if (stream->blocking == 2) /* asking the legacy stream spoils the capture of a blocking one */
    for (int i = 0; i < num_captures; i++)
      if (captures[i]->origin->blocking == 1) FAIL(cudaErrorStreamCaptureImplicit);
  *status = !stream->capture ? cudaStreamCaptureStatusNone
            : stream->capture->invalid ? cudaStreamCaptureStatusInvalidated : cudaStreamCaptureStatusActive;
  return cudaSuccess;
}

EXPORT cudaError_t cudaStreamGetCaptureInfo(cudaStream_t handle, enum cudaStreamCaptureStatus *status,
    unsigned long long *id, cudaGraph_t *graph, const cudaGraphNode_t **dependencies,
    const cudaGraphEdgeData **edges, size_t *num_dependencies) {
  Stream *stream = weft_stream(handle);
  CHECK(cudaStreamIsCapturing(handle, status));
  if (id) *id = stream->capture ? stream->capture->id : 0;
  if (graph) *graph = (cudaGraph_t)stream->capture;
  if (dependencies) *dependencies = NULL;
  if (edges) *edges = NULL;
  if (num_dependencies) *num_dependencies = 0;
  return cudaSuccess;
}

EXPORT cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *num_nodes) {
  if (nodes) return weft_unmodelled("cudaGraphGetNodes with room for nodes", cudaErrorNotSupported);
  *num_nodes = ((Graph *)graph)->num_nodes;
  return cudaSuccess;
}
EXPORT cudaError_t cudaGraphInstantiate(cudaGraphExec_t *exec, cudaGraph_t graph, unsigned long long flags) {
  CHECK(unsafe());
  *exec = (cudaGraphExec_t)graph;
  return cudaSuccess;
}
EXPORT cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *exec, cudaGraph_t graph, unsigned long long flags) {
  return cudaGraphInstantiate(exec, graph, flags);
}
EXPORT cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t handle) {
  Graph *launched = (Graph *)exec;
  Stream *stream = weft_stream(handle);
  if (stream->capture) {
    weft_dryrun_unmodelled("cudaGraphLaunch inside a capture");
    return last_error = cudaErrorNotSupported;
  }
  ISSUE(stream);
  weft_record("launch", ",\"s\":%d,\"graph\":%d,\"g\":%d%s", stream->id, launched->id, graph, weft_where(1));
  for (Node *node = launched->first; node; node = node->next) {
    if (node->function) node->function(node->argument);
    else memmove(node->dst, node->src, node->bytes);
  }
  return cudaSuccess;
}
EXPORT cudaError_t cudaGraphDestroy(cudaGraph_t graph) { return cudaSuccess; /* kept: it is small */ }
EXPORT cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) { return cudaSuccess; }
EXPORT cudaError_t cudaGraphDebugDotPrint(cudaGraph_t graph, const char *path, unsigned flags) { return cudaSuccess; }

/* ---- copies ------------------------------------------------------------------------------ */

static cudaError_t copy(const char *name, Stream *stream, void *dst, const void *src, size_t width,
                        size_t height, size_t dst_pitch, size_t src_pitch, int is_async) {
  Block block;
  if (!width || !height) return cudaSuccess;
  int to = find_block(dst, &block) ? block.device : -2, from = find_block(src, &block) ? block.device : -2;
  int graph = weft_issue(stream);
  if (graph < 0) return weft_fail(name, -graph);
  const char *kind = to >= 0 ? (from >= 0 ? "d2d" : "h2d") : from >= 0 ? "d2h" : "h2h";
  int waits = !graph && (!is_async || (to == -2 && from >= 0));  /* memory that is not pinned */
  weft_record("copy", ",\"s\":%d,\"g\":%d,\"kind\":\"%s\",\"reads\":[[%lu,%lu]],\"writes\":[[%lu,%lu]]%s",
      stream->id, graph, kind, (uintptr_t)src, src_pitch * (height - 1) + width, (uintptr_t)dst,
      dst_pitch * (height - 1) + width, weft_where(1));
  if (waits) {
    weft_record("sync", ",\"what\":\"%s\",\"s\":%d%s", name, stream->id, weft_where(1));
    finish(&stream->clock);
  }
  /* A collective whose result lies here or there comes first, in what it writes too. */
  if (!graph && !(weft_settle(src, src_pitch * (height - 1) + width) &&
                  weft_settle(dst, dst_pitch * (height - 1) + width)))
    return weft_fail(name, cudaErrorLaunchTimeout);
  for (size_t row = 0; row < height; row++) {
    void *to_row = (char *)dst + row * dst_pitch;
    const void *from_row = (const char *)src + row * src_pitch;
    if (graph) {
      Node *node = weft_node(stream);
      node->dst = to_row, node->src = from_row, node->bytes = width;
    } else memmove(to_row, from_row, width);
  }
  return cudaSuccess;
}

EXPORT cudaError_t cudaMemcpyAsync(void *dst, const void *src, size_t bytes, enum cudaMemcpyKind kind, cudaStream_t stream) {
  return copy(__func__, weft_stream(stream), dst, src, bytes, 1, 0, 0, 1);
}
EXPORT cudaError_t cudaMemcpy(void *dst, const void *src, size_t bytes, enum cudaMemcpyKind kind) {
  CHECK(unsafe());
  return copy(__func__, weft_stream(0), dst, src, bytes, 1, 0, 0, 0);
}
EXPORT cudaError_t cudaMemcpy2DAsync(void *dst, size_t dst_pitch, const void *src, size_t src_pitch,
    size_t width, size_t height, enum cudaMemcpyKind kind, cudaStream_t stream) {
  return copy(__func__, weft_stream(stream), dst, src, width, height, dst_pitch, src_pitch, 1);
}
EXPORT cudaError_t cudaMemcpyPeerAsync(void *dst, int to, const void *src, int from, size_t bytes, cudaStream_t stream) {
  return copy(__func__, weft_stream(stream), dst, src, bytes, 1, 0, 0, 1);
}

EXPORT cudaError_t cudaMemsetAsync(void *dst, int value, size_t bytes, cudaStream_t handle) {
  Stream *stream = weft_stream(handle);
  ISSUE(stream);
  weft_record("set", ",\"s\":%d,\"g\":%d,\"writes\":[[%lu,%lu]]%s", stream->id, graph, (uintptr_t)dst, bytes, weft_where(0));
  if (graph) return cudaSuccess;
  if (!weft_settle(dst, bytes)) FAIL(cudaErrorLaunchTimeout);
  memset(dst, value, bytes);
  return cudaSuccess;
}
EXPORT cudaError_t cudaMemset(void *dst, int value, size_t bytes) { return cudaMemsetAsync(dst, value, bytes, 0); }

EXPORT cudaError_t cudaLaunchHostFunc(cudaStream_t handle, cudaHostFn_t function, void *argument) {
  Stream *stream = weft_stream(handle);
  ISSUE(stream);
  weft_record("host", ",\"s\":%d,\"g\":%d%s", stream->id, graph, weft_where(0));
  if (graph) {
    Node *node = weft_node(stream);
    node->function = function, node->argument = argument;
  } else function(argument);
  return cudaSuccess;
}
EXPORT cudaError_t cudaStreamAddCallback(cudaStream_t handle, cudaStreamCallback_t callback, void *argument, unsigned flags) {
  Stream *stream = weft_stream(handle);
  CHECK(not_capturing(stream));
  weft_issue(stream);
  weft_record("host", ",\"s\":%d,\"g\":0%s", stream->id, weft_where(0));
  callback(handle, cudaSuccess, argument);
  return cudaSuccess;
}

/* ---- kernels ----------------------------------------------------------------------------- */

#define MAX_FUNCTIONS (1 << 20)
typedef struct { const void *key; const char *name; void *memory; } Function;
static Function *functions;
static pthread_mutex_t function_lock = PTHREAD_MUTEX_INITIALIZER;

static Function *function_of(const void *key, int add) {
  pthread_mutex_lock(&function_lock);
  if (!functions)
    functions = mmap(NULL, MAX_FUNCTIONS * sizeof *functions, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  size_t i = ((uintptr_t)key * 0x9E3779B97F4A7C15ull) >> 44;
  while (functions[i].key && functions[i].key != key) i = (i + 1) % MAX_FUNCTIONS;
  Function *function = functions + i;
  if (add) function->key = key;
  pthread_mutex_unlock(&function_lock);
  return function;
}

EXPORT void **__cudaRegisterFatBinary(void *binary) { static void *handle; return &handle; }
EXPORT void __cudaRegisterFatBinaryEnd(void **handle) {}
EXPORT void __cudaUnregisterFatBinary(void **handle) {}
EXPORT char __cudaInitModule(void **handle) { return 1; }
EXPORT void __cudaRegisterFunction(void **handle, const char *host, char *device, const char *name, int limit,
    void *tid, void *bid, void *block, void *grid, int *size) {
  function_of(host, 1)->name = name;
}
EXPORT void __cudaRegisterVar(void **handle, char *host, char *device, const char *name, int external,
    size_t bytes, int constant, int global) {
  Function *variable = function_of(host, 1);
  variable->name = name;
  if (!variable->memory) variable->memory = calloc(1, bytes ? bytes : 1);
}

typedef struct { dim3 grid, block; size_t shared; cudaStream_t stream; } Configuration;
static __thread Configuration configurations[16];
static __thread int num_configurations;
EXPORT unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, struct CUstream_st *stream) {
  if (num_configurations == 16) return 1;
  configurations[num_configurations++] = (Configuration){grid, block, shared, stream};
  return 0;
}
EXPORT cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
  if (!num_configurations) FAIL(cudaErrorInvalidValue);
  Configuration *c = configurations + --num_configurations;
  *grid = c->grid, *block = c->block, *shared = c->shared;
  *(cudaStream_t *)stream = c->stream;
  return cudaSuccess;
}
EXPORT cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *function) { *kernel = (cudaKernel_t)function; return cudaSuccess; }
EXPORT cudaError_t cudaGetKernel(cudaKernel_t *kernel, const void *function) { *kernel = (cudaKernel_t)function; return cudaSuccess; }

static cudaError_t launch(const char *name, cudaStream_t handle) {
  Stream *stream = weft_stream(handle);
  int graph = weft_issue(stream);
  if (graph < 0) return weft_fail("cudaLaunchKernel", -graph);
  weft_record("kernel", ",\"s\":%d,\"g\":%d,\"name\":\"%.200s\"%s", stream->id, graph, name ? name : "?", weft_where(0));
  return cudaSuccess;
}
/* For Python: one kernel in the place of those of a library that cannot run here. */
EXPORT cudaError_t weft_dryrun_kernel(const char *name, cudaStream_t stream) { return launch(name, stream); }
EXPORT cudaError_t cudaLaunchKernel(const void *function, dim3 grid, dim3 block, void **arguments, size_t shared, cudaStream_t stream) {
  return launch(function_of(function, 0)->name, stream);
}
EXPORT cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void **arguments, size_t shared, cudaStream_t stream) {
  return cudaLaunchKernel((const void *)kernel, grid, block, arguments, shared, stream);
}
EXPORT cudaError_t cudaLaunchCooperativeKernel(const void *function, dim3 grid, dim3 block, void **arguments, size_t shared, cudaStream_t stream) {
  return cudaLaunchKernel(function, grid, block, arguments, shared, stream);
}
EXPORT cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *function, void **arguments) {
  return cudaLaunchKernel(function, config->gridDim, config->blockDim, arguments, config->dynamicSmemBytes, config->stream);
}

EXPORT cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *a, const void *function) {
  memset(a, 0, sizeof *a);
  a->maxThreadsPerBlock = 1024;
  a->numRegs = 32;
  a->ptxVersion = a->binaryVersion = 90;
  a->maxDynamicSharedSizeBytes = 227 << 10;
  return cudaSuccess;
}
EXPORT cudaError_t cudaFuncSetAttribute(const void *function, enum cudaFuncAttribute attribute, int value) { return cudaSuccess; }
EXPORT cudaError_t cudaKernelSetAttributeForDevice(cudaKernel_t kernel, enum cudaFuncAttribute attribute, int value, int device) { return cudaSuccess; }
EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks_, const void *function, int size, size_t shared, unsigned flags) {
  *blocks_ = size > 0 && size <= 2048 ? 2048 / size : 1;
  return cudaSuccess;
}
EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks_, const void *function, int size, size_t shared) {
  return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks_, function, size, shared, 0);
}
EXPORT cudaError_t cudaGetSymbolAddress(void **pointer, const void *symbol) {
  *pointer = function_of(symbol, 0)->memory;
  if (!*pointer) FAIL(cudaErrorInvalidValue);
  return cudaSuccess;
}
EXPORT cudaError_t cudaMemcpyToSymbol(const void *symbol, const void *src, size_t bytes, size_t offset, enum cudaMemcpyKind kind) {
  char *memory = function_of(symbol, 0)->memory;
  if (!memory) FAIL(cudaErrorInvalidValue);
  memcpy(memory + offset, src, bytes);
  return cudaSuccess;
}

/* ---- no driver ----------------------------------------------------------------------------- */

/* There is no driver here and none is imitated: the runtime knows no entry point of it. */
EXPORT cudaError_t cudaGetDriverEntryPointByVersion(const char *symbol, void **function, unsigned version,
    unsigned long long flags, enum cudaDriverEntryPointQueryResult *status) {
  *function = NULL;
  if (status) *status = cudaDriverEntryPointSymbolNotFound;
  weft_unmodelled(symbol, cudaErrorSymbolNotFound);
  return cudaSuccess;
}

/* Torch itself asks whether a device has been used (hasPrimaryContext), and would ask the driver.
 * The runtime's own state answers: in place of the function of c10, and of the method of torch's
 * hooks, whose slot WEFT_SLOT the build has read from torch's headers. */
EXPORT _Bool weft_has_context(signed char device) __asm__("_ZN3c104cuda17hasPrimaryContextEa");
_Bool weft_has_context(signed char device) {
  return device >= 0 && device < num_devices && (legacy[device] || used_bytes[device]);
}
static _Bool hook_has_context(const void *hooks, signed char device) { return weft_has_context(device); }

static int set_slot(void **slot, void *value) {
  void *page = (void *)((uintptr_t)slot & ~(uintptr_t)4095);
  if (mprotect(page, 8192, PROT_READ | PROT_WRITE)) return 0;
  *slot = value;
  return !mprotect(page, 8192, PROT_READ);
}

EXPORT int weft_dryrun_torch(void) {
  void *torch = dlopen("libtorch_cpu.so", RTLD_NOLOAD | RTLD_NOW);
  char **(*hooks)(void) = torch ? dlsym(torch, "_ZN2at6detail12getCUDAHooksEv") : NULL;
  if (!hooks) return 0;
  return set_slot((void **)(*hooks() + WEFT_SLOT), hook_has_context);
}

/* Torch traces frees and events in Python, also while an exception is on its way up (the frames that
 * end hold tensors). It would lose the exception: each trace now gives it back. */
#define NUM_TRACES ((WEFT_LAST_TRACE - WEFT_FIRST_TRACE) / 8 + 1)
typedef void Trace(const void *self, uintptr_t device_type, uintptr_t one, uintptr_t two);
static Trace *traces[12];
static int (*take_python)(void);
static void (*give_python)(int), (*fetch_error)(void **, void **, void **), (*restore_error)(void *, void *, void *);

static void trace(int i, const void *self, uintptr_t device_type, uintptr_t one, uintptr_t two) {
  if (!enter_python()) return;
  void *type, *value, *line;
  int state = take_python();
  fetch_error(&type, &value, &line);
  traces[i](self, device_type, one, two);
  restore_error(type, value, line);
  give_python(state);
  leave_python();
}
#define TRACE(i) static void trace##i(const void *s, uintptr_t t, uintptr_t a, uintptr_t b) { trace(i, s, t, a, b); }
TRACE(0) TRACE(1) TRACE(2) TRACE(3) TRACE(4) TRACE(5) TRACE(6) TRACE(7) TRACE(8) TRACE(9) TRACE(10) TRACE(11)

/* A backward holds the watch of the thread that asked for it, until autograd's thread lets go of it. */
typedef void Decref(const void *self, void *object);
static Decref *torch_decref;
static void decref(const void *self, void *object) {
  if (!enter_python()) return;  /* the object stays, as torch leaves it when Python has ended */
  torch_decref(self, object);
  leave_python();
}

EXPORT int weft_dryrun_traces(void) {
  static Trace *const OWN[] = {trace0, trace1, trace2, trace3, trace4, trace5, trace6, trace7, trace8, trace9, trace10, trace11};
  void *core = dlopen("libc10.so", RTLD_NOLOAD | RTLD_NOW);
  char ****tracer = core ? dlsym(core, "_ZN3c104impl8GPUTrace13gpuTraceStateE") : NULL;
  take_python = dlsym(RTLD_DEFAULT, "PyGILState_Ensure");
  give_python = dlsym(RTLD_DEFAULT, "PyGILState_Release");
  fetch_error = dlsym(RTLD_DEFAULT, "PyErr_Fetch");
  restore_error = dlsym(RTLD_DEFAULT, "PyErr_Restore");
  if (!tracer || !*tracer || !fetch_error || !restore_error || NUM_TRACES > 12) return 0;
  char *methods = ***tracer;  /* interpreter -> its table -> its methods */
  void **slots = (void **)(methods + WEFT_FIRST_TRACE), **let_go = (void **)(methods + WEFT_DECREF);
  for (int i = 0; i < NUM_TRACES; i++) {
    traces[i] = slots[i];
    if (!set_slot(slots + i, OWN[i])) return 0;
  }
  torch_decref = *let_go;
  return set_slot(let_go, decref);
}
