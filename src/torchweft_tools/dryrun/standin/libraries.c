/* Stand-ins for cuBLAS, cuBLASLt and NCCL: products and collectives are recorded on their streams.
 * The data of small collectives really travels, through files of the dry run's folder, so that
 * programs that agree on sizes by a collective go on; it arrives when the host waits, as it would
 * on a device. Written from the documented API. */
#include "standin.h"
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <time.h>
#include <unistd.h>

/* ---- cuBLAS ------------------------------------------------------------------------------- */

typedef struct { cudaStream_t stream; cublasMath_t math; cublasPointerMode_t pointers; } Handle;

int weft_product(void *handle, const char *name) {
  Stream *stream = weft_stream(((Handle *)handle)->stream);
  int graph = weft_issue(stream);
  if (graph < 0) {
    weft_fail(name, -graph);
    return CUBLAS_STATUS_EXECUTION_FAILED;
  }
  weft_record("kernel", ",\"s\":%d,\"g\":%d,\"name\":\"%s\"%s", stream->id, graph, name, weft_where(0));
  return CUBLAS_STATUS_SUCCESS;
}

#define OK CUBLAS_STATUS_SUCCESS
EXPORT cublasStatus_t cublasCreate_v2(cublasHandle_t *handle) { *handle = calloc(1, sizeof(Handle)); return OK; }
EXPORT cublasStatus_t cublasDestroy_v2(cublasHandle_t handle) { free(handle); return OK; }
EXPORT cublasStatus_t cublasGetVersion_v2(cublasHandle_t handle, int *version) { *version = CUBLAS_VERSION; return OK; }
EXPORT cublasStatus_t cublasSetStream_v2(cublasHandle_t handle, cudaStream_t stream) { ((Handle *)handle)->stream = stream; return OK; }
EXPORT cublasStatus_t cublasGetStream_v2(cublasHandle_t handle, cudaStream_t *stream) { *stream = ((Handle *)handle)->stream; return OK; }
EXPORT cublasStatus_t cublasSetMathMode(cublasHandle_t handle, cublasMath_t mode) { ((Handle *)handle)->math = mode; return OK; }
EXPORT cublasStatus_t cublasGetMathMode(cublasHandle_t handle, cublasMath_t *mode) { *mode = ((Handle *)handle)->math; return OK; }
EXPORT cublasStatus_t cublasSetPointerMode_v2(cublasHandle_t handle, cublasPointerMode_t mode) { ((Handle *)handle)->pointers = mode; return OK; }
EXPORT cublasStatus_t cublasGetPointerMode_v2(cublasHandle_t handle, cublasPointerMode_t *mode) { *mode = ((Handle *)handle)->pointers; return OK; }
EXPORT cublasStatus_t cublasSetWorkspace_v2(cublasHandle_t handle, void *space, size_t bytes) { return OK; }
EXPORT cublasStatus_t cublasSetSmCountTarget(cublasHandle_t handle, int count) { return OK; }

/* at::cuda::getCurrentCUDABlasHandle of torch: it would ask the driver for a context first. The
 * handle of this thread and device, on torch's current stream; there is no workspace. */
typedef struct { int64_t device, id; } TorchStream;  /* c10::cuda::CUDAStream, in two registers */
EXPORT cublasHandle_t weft_blas_handle(_Bool setup) __asm__("_ZN2at4cuda24getCurrentCUDABlasHandleEb");
cublasHandle_t weft_blas_handle(_Bool setup) {
  static __thread Handle own[64];
  static TorchStream (*current)(signed char);
  static cudaStream_t (*handle_of)(const TorchStream *);
  if (!handle_of) {
    void *torch = dlopen("libc10_cuda.so", RTLD_NOLOAD | RTLD_NOW);
    current = dlsym(torch, "_ZN3c104cuda20getCurrentCUDAStreamEa");
    handle_of = dlsym(torch, "_ZNK3c104cuda10CUDAStream6streamEv");
  }
  TorchStream stream = current(-1);
  own[weft_device].stream = handle_of(&stream);
  return (cublasHandle_t)&own[weft_device];
}

/* ---- cuBLASLt: descriptions are not looked at, any product has one algorithm --------------- */

EXPORT size_t cublasLtGetVersion(void) { return CUBLAS_VERSION; }
EXPORT cublasStatus_t cublasLtCreate(cublasLtHandle_t *handle) { *handle = calloc(1, 64); return OK; }
EXPORT cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle) { free(handle); return OK; }
EXPORT cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t *desc, cublasComputeType_t compute, cudaDataType_t scale) { *desc = calloc(1, sizeof **desc); return OK; }
EXPORT cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t desc) { free(desc); return OK; }
EXPORT cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t desc, cublasLtMatmulDescAttributes_t attribute, const void *value, size_t bytes) { return OK; }
EXPORT cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t *layout, cudaDataType type, uint64_t rows, uint64_t cols, int64_t ld) { *layout = calloc(1, sizeof **layout); return OK; }
EXPORT cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t layout) { free(layout); return OK; }
EXPORT cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t layout, cublasLtMatrixLayoutAttribute_t attribute, const void *value, size_t bytes) { return OK; }
EXPORT cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t *preference) { *preference = calloc(1, sizeof **preference); return OK; }
EXPORT cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t preference) { free(preference); return OK; }
EXPORT cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t preference, cublasLtMatmulPreferenceAttributes_t attribute, const void *value, size_t bytes) { return OK; }

EXPORT cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t handle, cublasLtMatmulDesc_t operation,
    cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
    cublasLtMatmulPreference_t preference, int wanted, cublasLtMatmulHeuristicResult_t *results, int *num_results) {
  *num_results = wanted > 0;
  if (wanted > 0) memset(results, 0, sizeof *results);
  return OK;
}

EXPORT cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t compute, const void *alpha,
    const void *a, cublasLtMatrixLayout_t a_desc, const void *b, cublasLtMatrixLayout_t b_desc, const void *beta,
    const void *c, cublasLtMatrixLayout_t c_desc, void *d, cublasLtMatrixLayout_t d_desc,
    const cublasLtMatmulAlgo_t *algorithm, void *space, size_t space_bytes, cudaStream_t stream) {
  Handle own = {stream};
  return weft_product(&own, "cublasLtMatmul");
}

/* ---- NCCL: communicators ------------------------------------------------------------------ */

struct ncclComm {
  char id[17];
  int rank, size, device, num_splits;
  uint64_t sequence, *to, *from;  /* collectives so far; messages to and from each rank */
};

static uint64_t hash(const void *bytes, size_t size, uint64_t value) {
  for (size_t i = 0; i < size; i++) value = (value ^ ((const unsigned char *)bytes)[i]) * 0x100000001B3ull;
  return value;
}

static ncclComm_t new_comm(uint64_t id, int rank, int size) {
  ncclComm_t comm = calloc(1, sizeof *comm);
  snprintf(comm->id, sizeof comm->id, "%016lx", id);
  comm->rank = rank, comm->size = size, comm->device = weft_device;
  comm->to = calloc(size, sizeof *comm->to);
  comm->from = calloc(size, sizeof *comm->from);
  weft_record("comm", ",\"comm\":\"%s\",\"rank\":%d,\"size\":%d%s", comm->id, rank, size, weft_where(0));
  return comm;
}

EXPORT ncclResult_t ncclGetVersion(int *version) { *version = NCCL_VERSION_CODE; return ncclSuccess; }
EXPORT ncclResult_t ncclGetUniqueId(ncclUniqueId *id) {
  memset(id, 0, sizeof *id);
  int file = open("/dev/urandom", O_RDONLY);
  ssize_t size = read(file, id->internal, 16);
  close(file);
  return size == 16 ? ncclSuccess : ncclSystemError;
}
EXPORT ncclResult_t ncclCommInitRank(ncclComm_t *comm, int size, ncclUniqueId id, int rank) {
  *comm = new_comm(hash(id.internal, sizeof id.internal, 0xCBF29CE484222325ull), rank, size);
  return ncclSuccess;
}
EXPORT ncclResult_t ncclCommInitRankConfig(ncclComm_t *comm, int size, ncclUniqueId id, int rank, ncclConfig_t *config) {
  return ncclCommInitRank(comm, size, id, rank);
}
EXPORT ncclResult_t ncclCommInitRankScalable(ncclComm_t *comm, int size, int rank, int num_ids, ncclUniqueId *ids, ncclConfig_t *config) {
  return ncclCommInitRank(comm, size, ids[0], rank);
}
EXPORT ncclResult_t ncclCommInitAll(ncclComm_t *comms, int size, const int *devices) {
  ncclUniqueId id;
  int before = weft_device;
  ncclGetUniqueId(&id);
  for (int rank = 0; rank < size; rank++) {
    weft_device = devices ? devices[rank] : rank;
    ncclCommInitRank(comms + rank, size, id, rank);
  }
  weft_device = before;
  return ncclSuccess;
}
/* Communicators stay: waits that come later still look at them. */
EXPORT ncclResult_t ncclCommFinalize(ncclComm_t comm) { return ncclSuccess; }
EXPORT ncclResult_t ncclCommDestroy(ncclComm_t comm) { return ncclSuccess; }
EXPORT ncclResult_t ncclCommAbort(ncclComm_t comm) { return ncclSuccess; }
EXPORT const char *ncclGetErrorString(ncclResult_t result) {
  return result == ncclSuccess ? "no error"
       : result == ncclRemoteError ? "a rank never came to the collective" : "not modelled by the dry run";
}
EXPORT const char *ncclGetLastError(ncclComm_t comm) { return ""; }
EXPORT ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *error) { *error = ncclSuccess; return ncclSuccess; }
EXPORT ncclResult_t ncclCommCount(const ncclComm_t comm, int *count) { *count = comm->size; return ncclSuccess; }
EXPORT ncclResult_t ncclCommCuDevice(const ncclComm_t comm, int *device) { *device = comm->device; return ncclSuccess; }
EXPORT ncclResult_t ncclCommUserRank(const ncclComm_t comm, int *rank) { *rank = comm->rank; return ncclSuccess; }
EXPORT ncclResult_t ncclMemAlloc(void **pointer, size_t bytes) { return cudaMalloc(pointer, bytes) ? ncclSystemError : ncclSuccess; }
EXPORT ncclResult_t ncclMemFree(void *pointer) { return cudaFree(pointer) ? ncclSystemError : ncclSuccess; }
EXPORT ncclResult_t ncclCommRegister(const ncclComm_t comm, void *buffer, size_t bytes, void **handle) { *handle = buffer; return ncclSuccess; }
EXPORT ncclResult_t ncclCommDeregister(const ncclComm_t comm, void *handle) { return ncclSuccess; }
EXPORT ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t *op, void *scalar, ncclDataType_t type, ncclScalarResidence_t residence, ncclComm_t comm) { *op = ncclSum; return ncclSuccess; }
EXPORT ncclResult_t ncclRedOpDestroy(ncclRedOp_t op, ncclComm_t comm) { return ncclSuccess; }

/* ---- NCCL: data through files -------------------------------------------------------------- */

#define MAX_DATA (64 << 10)  /* larger contributions are recorded and not moved */

static void data_name(char *name, const char *comm, const char *kind, uint64_t number, int rank, int peer) {
  const char *folder = getenv("WEFT_DRYRUN_FOLDER");
  snprintf(name, 4096, "%s/data-%s-%s-%lu-%d-%d", folder ? folder : ".", comm, kind, number, rank, peer);
}

static void post(const char *name, const void *bytes, size_t size) {
  char draft[4200];
  snprintf(draft, sizeof draft, "%s.part", name);
  int file = open(draft, O_WRONLY | O_CREAT | O_TRUNC, 0644);
  if (file < 0 || write(file, bytes, size) != (ssize_t)size || close(file) || rename(draft, name))
    fprintf(stderr, "torchweft dryrun: %s cannot be written: %s\n", name, strerror(errno));
}

static int collect(const char *name, void *bytes, size_t size) {
  const char *patience = getenv("WEFT_DRYRUN_PATIENCE_S");
  double left_s = patience ? atof(patience) : 60;
  for (int file; left_s > 0; left_s -= 0.001) {
    if ((file = open(name, O_RDONLY)) >= 0) {
      ssize_t got = read(file, bytes, size);
      close(file);
      return got == (ssize_t)size;
    }
    nanosleep(&(struct timespec){0, 1000000}, NULL);
  }
  return 0;
}

EXPORT ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t *child, ncclConfig_t *config) {
  int own[2] = {color, key}, rank = 0, size = 0, number = ++comm->num_splits;
  char name[4096];
  data_name(name, comm->id, "split", number, comm->rank, 0);
  post(name, own, sizeof own);
  for (int r = 0; r < comm->size; r++) {
    int other[2];
    data_name(name, comm->id, "split", number, r, 0);
    if (!collect(name, other, sizeof other)) return ncclRemoteError;
    if (other[0] != color) continue;
    size++;
    rank += other[1] < key || (other[1] == key && r < comm->rank);
  }
  *child = NULL;
  if (color == NCCL_SPLIT_NOCOLOR) return ncclSuccess;
  uint64_t id = hash(&number, sizeof number, hash(&color, sizeof color, strtoull(comm->id, NULL, 16)));
  *child = new_comm(id, rank, size);
  return ncclSuccess;
}

/* A collective whose result the host has not asked for. */
typedef struct Pending {
  struct Pending *next;
  ncclComm_t comm;
  const char *kind;
  uint64_t number;
  size_t count;        /* of each rank's contribution */
  ncclDataType_t type;
  int op, root;        /* root: of one; or the other side of a message */
  char *out;
  size_t out_bytes;
} Pending;

static Pending *pending, **last_pending = &pending;
static pthread_mutex_t pending_lock = PTHREAD_MUTEX_INITIALIZER;

static size_t size_of(ncclDataType_t type) {
  static const size_t SIZES[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
  return SIZES[type];
}

#define REDUCE(type) do { \
  type *sum = to; const type *item = from; \
  for (size_t i = 0; i < count; i++) switch (op) { \
    case ncclProd: sum[i] *= item[i]; break; \
    case ncclMax: if (item[i] > sum[i]) sum[i] = item[i]; break; \
    case ncclMin: if (item[i] < sum[i]) sum[i] = item[i]; break; \
    default: sum[i] += item[i]; \
  } } while (0)

static void reduce(void *to, const void *from, size_t count, ncclDataType_t type, int op) {
  switch (type) { /* half-precision numbers stay those of the first rank */
    case ncclInt8: REDUCE(int8_t); break;
    case ncclUint8: REDUCE(uint8_t); break;
    case ncclInt32: REDUCE(int32_t); break;
    case ncclUint32: REDUCE(uint32_t); break;
    case ncclInt64: REDUCE(int64_t); break;
    case ncclUint64: REDUCE(uint64_t); break;
    case ncclFloat32: REDUCE(float); break;
    case ncclFloat64: REDUCE(double); break;
    default: break;
  }
}

static int settle_one(Pending *p) {
  size_t bytes = p->count * size_of(p->type);
  int size = p->comm->size, rank = p->comm->rank;
  char name[4096], *all = malloc(bytes * size + 1);
  int is_message = !strcmp(p->kind, "recv");
  int has_root = !strcmp(p->kind, "broadcast") || !strcmp(p->kind, "scatter");
  int is_good = 1;
  for (int r = 0; r < size && is_good; r++) {
    if (is_message || has_root ? r != p->root : 0) continue;
    data_name(name, p->comm->id, is_message ? "message" : "all", p->number, r, is_message ? rank : 0);
    is_good = collect(name, all + r * bytes, bytes);
    if (!is_good) {
      weft_record("missing", ",\"comm\":\"%s\",\"kind\":\"%s\",\"number\":%lu,\"peer\":%d", p->comm->id, p->kind, p->number, r);
      fprintf(stderr, "torchweft dryrun: rank %d waits for %s number %lu of communicator %s, and rank %d "
              "never came to it\n", rank, p->kind, p->number, p->comm->id, r);
    }
  }
  size_t share = bytes / size;
  if (!is_good) {
  } else if (is_message || has_root) {
    if (!strcmp(p->kind, "scatter")) memcpy(p->out, all + p->root * bytes + rank * share, share);
    else memcpy(p->out, all + p->root * bytes, bytes);
  } else if (strstr(p->kind, "gather")) {
    memcpy(p->out, all, bytes * size);
  } else if (!strcmp(p->kind, "all_to_all")) {
    for (int r = 0; r < size; r++) memcpy(p->out + r * share, all + r * bytes + rank * share, share);
  } else {
    for (int r = 1; r < size; r++) reduce(all, all + r * bytes, p->count, p->type, p->op);
    if (p->op == ncclAvg && p->type == ncclFloat32)
      for (size_t i = 0; i < p->count; i++) ((float *)all)[i] /= size;
    int is_scattered = !strcmp(p->kind, "reduce_scatter");
    memcpy(p->out, all + (is_scattered ? rank * share : 0), is_scattered ? share : bytes);
  }
  free(all);
  return is_good;
}

int weft_settle(const void *source, size_t bytes) {
  pthread_mutex_lock(&pending_lock);
  int wanted = source == NULL, is_good = 1;
  for (Pending *p = pending; p && !wanted; p = p->next)
    wanted = (const char *)source < p->out + p->out_bytes && p->out < (const char *)source + bytes;
  while (wanted && pending && is_good) {
    Pending *p = pending;
    is_good = settle_one(p);
    if (!(pending = p->next)) last_pending = &pending;
    free(p);
  }
  pthread_mutex_unlock(&pending_lock);
  return is_good;
}

EXPORT int weft_dryrun_settle(const void *source, size_t bytes) { return weft_settle(source, bytes); }

/* ---- NCCL: collectives --------------------------------------------------------------------- */

static __thread int group_depth, group;
static int num_groups;
EXPORT ncclResult_t ncclGroupStart(void) {
  if (!group_depth++) group = __sync_add_and_fetch(&num_groups, 1);
  return ncclSuccess;
}
EXPORT ncclResult_t ncclGroupEnd(void) {
  if (!group_depth) return ncclInvalidUsage;
  if (!--group_depth) group = 0;
  return ncclSuccess;
}

/* in and out: elements that this rank reads and writes; peer: the root, or the other side, or -1. */
static ncclResult_t talk(const char *kind, const void *src, size_t in, void *dst, size_t out,
                         ncclDataType_t type, int op, int peer, ncclComm_t comm, cudaStream_t handle) {
  Stream *stream = weft_stream(handle);
  int graph = weft_issue(stream), is_send = !strcmp(kind, "send"), is_recv = !strcmp(kind, "recv");
  if (graph < 0) {
    weft_fail(kind, -graph);
    return ncclUnhandledCudaError;
  }
  size_t in_bytes = in * size_of(type), out_bytes = out * size_of(type);
  weft_record("collective", ",\"kind\":\"%s\",\"s\":%d,\"g\":%d,\"comm\":\"%s\",\"rank\":%d,\"size\":%d,"
      "\"in\":%lu,\"out\":%lu,\"dtype\":%d,\"reduce\":%d,\"peer\":%d,\"group\":%d,"
      "\"reads\":[[%lu,%lu]],\"writes\":[[%lu,%lu]]%s",
      kind, stream->id, graph, comm->id, comm->rank, comm->size, in, out, type, op, peer, group,
      (uintptr_t)src, in_bytes, (uintptr_t)dst, out_bytes, weft_where(1));
  if (graph) return ncclSuccess;
  uint64_t number = is_send ? comm->to[peer]++ : is_recv ? comm->from[peer]++ : comm->sequence++;
  size_t count = !strcmp(kind, "scatter") ? out * comm->size : in ? in : out;  /* the same on all ranks */
  if (count * size_of(type) > MAX_DATA) return ncclSuccess;
  char name[4096];
  data_name(name, comm->id, is_send || is_recv ? "message" : "all", number, comm->rank, is_send ? peer : 0);
  if (in_bytes) {
    if (!weft_settle(src, in_bytes)) return ncclRemoteError;
    post(name, src, in_bytes);
  }
  if (!out_bytes) return ncclSuccess;
  Pending *p = calloc(1, sizeof *p);
  *p = (Pending){NULL, comm, kind, number, count, type, op, peer, dst, out_bytes};
  pthread_mutex_lock(&pending_lock);
  *last_pending = p;
  last_pending = &p->next;
  pthread_mutex_unlock(&pending_lock);
  return ncclSuccess;
}

EXPORT ncclResult_t ncclAllReduce(const void *src, void *dst, size_t count, ncclDataType_t type, ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
  return talk("all_reduce", src, count, dst, count, type, op, -1, comm, stream);
}
EXPORT ncclResult_t ncclAllGather(const void *src, void *dst, size_t count, ncclDataType_t type, ncclComm_t comm, cudaStream_t stream) {
  return talk("all_gather", src, count, dst, count * comm->size, type, -1, -1, comm, stream);
}
EXPORT ncclResult_t ncclReduceScatter(const void *src, void *dst, size_t count, ncclDataType_t type, ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
  return talk("reduce_scatter", src, count * comm->size, dst, count, type, op, -1, comm, stream);
}
EXPORT ncclResult_t ncclAlltoAll(const void *src, void *dst, size_t count, ncclDataType_t type, ncclComm_t comm, cudaStream_t stream) {
  return talk("all_to_all", src, count * comm->size, dst, count * comm->size, type, -1, -1, comm, stream);
}
EXPORT ncclResult_t ncclBroadcast(const void *src, void *dst, size_t count, ncclDataType_t type, int root, ncclComm_t comm, cudaStream_t stream) {
  return talk("broadcast", src, comm->rank == root ? count : 0, dst, count, type, -1, root, comm, stream);
}
EXPORT ncclResult_t ncclBcast(void *buffer, size_t count, ncclDataType_t type, int root, ncclComm_t comm, cudaStream_t stream) {
  return ncclBroadcast(buffer, buffer, count, type, root, comm, stream);
}
EXPORT ncclResult_t ncclReduce(const void *src, void *dst, size_t count, ncclDataType_t type, ncclRedOp_t op, int root, ncclComm_t comm, cudaStream_t stream) {
  return talk("reduce", src, count, dst, comm->rank == root ? count : 0, type, op, root, comm, stream);
}
EXPORT ncclResult_t ncclGather(const void *src, void *dst, size_t count, ncclDataType_t type, int root, ncclComm_t comm, cudaStream_t stream) {
  return talk("gather", src, count, dst, comm->rank == root ? count * comm->size : 0, type, -1, root, comm, stream);
}
EXPORT ncclResult_t ncclScatter(const void *src, void *dst, size_t count, ncclDataType_t type, int root, ncclComm_t comm, cudaStream_t stream) {
  return talk("scatter", src, comm->rank == root ? count * comm->size : 0, dst, count, type, -1, root, comm, stream);
}
EXPORT ncclResult_t ncclSend(const void *src, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream) {
  return talk("send", src, count, NULL, 0, type, -1, peer, comm, stream);
}
EXPORT ncclResult_t ncclRecv(void *dst, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream) {
  return talk("recv", NULL, 0, dst, count, type, -1, peer, comm, stream);
}
